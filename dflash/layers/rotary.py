"""Angles of rotary position embedding in half-split form, and their scaling for long contexts.

Source: Su et al. 2021; scaling as in the Llama 3.1 release, and YaRN, Peng et al. 2023
(arXiv 2309.00071).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dflash.config.schema import RopeScaling, TargetArchitecture


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns the angular frequencies in radians per position, float32 [H/2]."""
    freqs = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        freqs = _SCALES[scaling.rope_type](freqs, theta, scaling)
    return freqs.astype(np.float32)


def amplitude(scaling: RopeScaling | None) -> float:
    """Returns the factor that multiplies cos and sin; it is 1 except under YaRN."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling, scaling.mscale) / mscale(scaling, scaling.mscale_all_dim)
    return mscale(scaling, 1.0)


def mscale(scaling: RopeScaling, weight: float) -> float:
    """Returns YaRN's attention scaling: 1 + 0.1 · weight · log(scaling factor)."""
    return 1.0 + 0.1 * weight * math.log(scaling.factor)


def _scale_linear(freqs: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    del theta
    return freqs / scaling.factor


def _scale_llama3(freqs: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between them."""
    del theta
    context = scaling.original_max_position_embeddings
    turns = context * freqs / (2 * math.pi)  # Full turns within the original context.
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * freqs + (1 - keep) * freqs / scaling.factor


def _scale_yarn(freqs: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Scales like `_scale_llama3`, but interpolates linearly in the dimension's index."""
    context, dim = scaling.original_max_position_embeddings, 2 * len(freqs)
    ends = [
        dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    if scaling.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    begin, end = max(ends[0], 0), min(ends[1], dim - 1)
    end = end if end != begin else begin + 0.001  # Avoid a division by zero.
    slowed = np.clip((np.arange(len(freqs)) - begin) / (end - begin), 0.0, 1.0)
    return (1 - slowed) * freqs + slowed * freqs / scaling.factor


_SCALES = {"linear": _scale_linear, "llama3": _scale_llama3, "yarn": _scale_yarn}


def angles(positions: jax.Array, arch: TargetArchitecture) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, each float32 [B, T, 1, H/2], of positions int32 [B, T]."""
    freqs = frequencies(arch.head_dim, arch.rope_theta, arch.rope_scaling)
    cos, sin = angles_at(positions, freqs)
    factor = amplitude(arch.rope_scaling)
    return cos * factor, sin * factor


def angles_at(positions: jax.Array, freqs: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, each float32 [B, T, 1, F], of positions [B, T] at frequencies [F]."""
    turned = positions[..., None, None].astype(jnp.float32) * freqs
    return jnp.cos(turned), jnp.sin(turned)
