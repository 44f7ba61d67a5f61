"""Prefill and decoding on engines of their own: prompts are computed here and decoded there."""
