"""Checkpoints on disk, and models assembled from them."""
