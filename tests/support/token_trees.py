"""Random token trees."""

import numpy as np


def random_parents(rng: np.random.Generator, batch: int, drafts: int) -> np.ndarray:
    """Returns a parent row of each draft, int32 [B, G]; row 0 is the anchor."""
    return rng.integers(0, np.arange(1, drafts + 1), (batch, drafts)).astype(np.int32)


def random_ancestry(rng: np.random.Generator, batch: int, rows: int) -> np.ndarray:
    """Returns the ancestor-or-self mask of random trees, bool [B, R, R]."""
    parents = random_parents(rng, batch, rows - 1)
    ancestry = np.broadcast_to(np.eye(rows, dtype=bool), (batch, rows, rows)).copy()
    for draft in range(rows - 1):
        for b in range(batch):
            ancestry[b, draft + 1] |= ancestry[b, parents[b, draft]]
    return ancestry
