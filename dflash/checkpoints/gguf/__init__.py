"""GGUF files: read as checkpoints, and written."""
