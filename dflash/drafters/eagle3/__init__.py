"""EAGLE-3: autoregressive drafter with a single layer."""
