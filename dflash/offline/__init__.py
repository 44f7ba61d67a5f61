"""Decoding a list of prompts: from the job to its summary."""
