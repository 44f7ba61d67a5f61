"""A smaller language model as drafter."""
