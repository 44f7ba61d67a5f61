"""Assembles a run: from a config and checkpoints to models, tokenizer and prompts."""
