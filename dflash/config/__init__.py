"""Configuration: the schema of every key, and the loader that fills it. Imports no jax."""
