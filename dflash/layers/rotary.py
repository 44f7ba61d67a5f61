"""Angles of rotary position embedding, half-split form, with Llama 3's frequency scaling.

Source: Su et al. 2021; scaling as in the Llama 3.1 release.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dflash.config.schema import RopeScaling, TargetArchitecture


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angular frequencies in radians per position, float32 [H/2]."""
    freqs = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        freqs = _scale_llama3(freqs, scaling)
    return freqs.astype(np.float32)


def _scale_llama3(freqs: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Slows long wavelengths by `factor`, keeps short ones, and blends in between."""
    context = scaling.original_max_position_embeddings
    turns = context * freqs / (2 * math.pi)  # full turns within the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * freqs + (1 - keep) * freqs / scaling.factor


def angles(positions: jax.Array, arch: TargetArchitecture) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each float32 [B, T, 1, H/2], for positions int32 [B, T]."""
    freqs = frequencies(arch.head_dim, arch.rope_theta, arch.rope_scaling)
    turned = positions[..., None, None].astype(jnp.float32) * freqs
    return jnp.cos(turned), jnp.sin(turned)
