"""What the tests of rejection share: its noise, and how well tokens fit the target."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash.inference.logits.sampling import SamplingParams

VOCAB = 6


def make_params(batch: int, temperature: float = 1.0, seed: int = 0) -> SamplingParams:
    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), batch)
    return SamplingParams(
        jax.random.key_data(keys),
        jnp.full(batch, temperature, jnp.float32),
        jnp.zeros(batch, jnp.int32),
        jnp.ones(batch, jnp.float32),
        jnp.zeros(batch, jnp.float32),
    )


def chi_square(first: np.ndarray, second: np.ndarray, joint: np.ndarray) -> float:
    from scipy import stats  # Takes a second.

    vocab = len(joint)
    counts = np.bincount(first * vocab + second, minlength=vocab**2)
    wanted = joint.ravel() * len(first)
    if counts[wanted == 0].any():
        return 0.0
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    return stats.chisquare(counts, wanted * len(first) / wanted.sum()).pvalue
