"""What the tests of rejection share: its noise, and how well tokens fit the target."""

import numpy as np

from dflash.inference.logits.sampling import SamplingParams

VOCAB = 6


def make_params(batch: int, temperature: float = 1.0, seed: int = 0) -> SamplingParams:
    keys = np.random.default_rng(seed).integers(0, 2**32, (batch, 2), np.uint32)
    ones = np.ones(batch, np.float32)
    zeros = np.zeros(batch, np.float32)
    return SamplingParams(keys, temperature * ones, zeros.astype(np.int32), ones, zeros)


def chi_square(first: np.ndarray, second: np.ndarray, joint: np.ndarray) -> float:
    from scipy import stats  # Takes a second.

    vocab = len(joint)
    counts = np.bincount(first * vocab + second, minlength=vocab**2)
    wanted = joint.ravel() * len(first)
    if counts[wanted == 0].any():
        return 0.0
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    return stats.chisquare(counts, wanted * len(first) / wanted.sum()).pvalue
