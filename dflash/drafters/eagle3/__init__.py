"""EAGLE-3: an autoregressive drafter of one layer."""
