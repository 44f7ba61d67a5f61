"""Tokenizers, chat templates, prompts and JSON lines."""
