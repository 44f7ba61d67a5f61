"""Configuration without jax: the schema of every key, and the loader that fills it."""
