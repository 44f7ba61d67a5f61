"""Calibration of drafts: the chance that one is accepted, by the drafter's probability of it.

A draft of probability q, given the ones before it, is accepted with chance sigmoid(a · logit q + b)
if these are. Drafts 1, 2 … 3, 4 … 7 and so on after the anchor have an (a, b) of their own each.

Source: TreeSpark, arXiv 2609.22098.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Calibration = Sequence[Sequence[float]]  # (a, b) of each group of depths; the last one has no end.
IDENTITY: Calibration = ((1.0, 0.0),)
_MOST = -1e-6  # Largest log-probability; logits of 1 are infinite.


def log_chances(scores: jax.Array, pairs: jax.Array) -> jax.Array:
    """Returns the logarithms of chances, at most 0, which rise with the scores.

    Args:
      scores: Log-probabilities of drafts, float32 [..., k].
      pairs: (a, b) of the drafts' depths, float32 [..., 2]; see `by_depth`.
    """
    scores = jnp.minimum(scores, _MOST)
    odds = scores - jnp.log(-jnp.expm1(scores))
    return jax.nn.log_sigmoid(pairs[..., :1] * odds + pairs[..., 1:])


def by_depth(calibration: Calibration, depth: int) -> np.ndarray:
    """Returns the (a, b) of drafts 1 … `depth` after the anchor, float32 [depth, 2]."""
    groups = group(np.arange(1, depth + 1))
    last = len(calibration) - 1
    return np.asarray(calibration, np.float32)[np.minimum(groups, last)]


def group(depth: np.ndarray) -> np.ndarray:
    """Returns the group of drafts by their depth, 1 for the draft after the anchor; int [...]."""
    return np.frexp(depth)[1] - 1
