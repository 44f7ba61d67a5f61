"""Token trees, each as the mask of a row's ancestors and itself."""

import numpy as np


def ancestry(parents) -> np.ndarray:
    """Returns the mask bool [R, R] of the tree in which row g + 1 continues row parents[g]."""
    seen = np.eye(len(parents) + 1, dtype=bool)
    for draft, parent in enumerate(parents):
        seen[draft + 1] |= seen[parent]
    return seen


def random_ancestry(rng: np.random.Generator, batch: int, rows: int) -> np.ndarray:
    """Returns the masks of random trees, bool [B, R, R]."""
    parents = rng.integers(0, np.arange(1, rows), (batch, rows - 1))
    return np.stack([ancestry(each) for each in parents])


# Of five drafts: two branches, a chain, and siblings.
TREES = np.stack([ancestry([0, 0, 1, 1, 2]), ancestry([0, 1, 2, 3, 4]), ancestry([0] * 5)])
