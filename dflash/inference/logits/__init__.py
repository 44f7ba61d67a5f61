"""Tokens from the logits of each row: controls, sampling, log-probabilities and checks."""
