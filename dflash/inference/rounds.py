"""Expected number of cycles that decode a recorded answer.

Source: the backward recurrence of arXiv 2610.10411.
"""

import numpy as np


def expected_cycles(chances: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the expected number of cycles that commit each answer after its first token.

    A cycle whose anchor is token n commits the drafts before the first rejected one, and the
    target's token in place of that. If all G drafts are accepted, it commits G + 1 tokens.

    Args:
      chances: Chances in [0, 1] that draft h of a cycle at token n is accepted, given that all
        drafts before it are, float [A, N, G]. Entries are ignored for tokens past the end of an
        answer, and for anchors that no cycle reaches.
      counts: Number of tokens after the first one, int [A], at most N.
    Returns:
      float64 [A]; 0 for answers of a single token.
    """
    answers, length, drafts = chances.shape
    left = np.zeros((answers, length + drafts + 1))  # Expected cycles from each anchor on.
    for n in reversed(range(length)):
        value = left[:, n + drafts + 1]
        for h in reversed(range(drafts)):
            chance = chances[:, n, h]
            value = chance * value + (1 - chance) * left[:, n + 1 + h]
        left[:, n] = np.where(n < counts, 1 + value, 0)
    return left[:, 0]
