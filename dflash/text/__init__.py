"""Tokenizers, chat templates, prompts, grammars and JSON lines.

Functions raise InputError for unusable files, texts and messages, and name the place.
"""
