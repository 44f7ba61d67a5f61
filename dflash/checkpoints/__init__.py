"""Checkpoints on disk, and models assembled from them.

Functions raise CheckpointError for what is missing, damaged or unsupported, and name the file.
"""
