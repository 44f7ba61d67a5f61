"""Tokenizers, chat templates, prompts, grammars and JSON lines."""
