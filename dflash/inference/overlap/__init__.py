"""Drafting on devices of its own, while the target verifies."""
