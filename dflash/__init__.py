"""Lossless speculative decoding with block-diffusion drafters, in JAX."""

__version__ = "0.1.0"
