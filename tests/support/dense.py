"""Attention as a textbook writes it: what every kernel is compared with, and how closely."""

import numpy as np


def dense_attention(queries, keys, values, visible, scale, sinks=None):
    """Softmax attention of one sequence in float64, one head at a time.

    Args:
      queries: [T, N, H].
      keys: [L, K, H].
      values: [L, K, H].
      visible: bool [T, L].
      scale: factor on the scores.
      sinks: [N]; a further score of each head, of a key without a value.
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
    outputs = np.zeros(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for head in range(queries.shape[1]):
        scores = scale * queries[:, head] @ keys[:, head // group].T
        scores = np.where(visible, scores, -np.inf)
        if sinks is not None:
            sink = np.full((len(scores), 1), sinks[head], np.float64)
            scores = np.concatenate([scores, sink], axis=1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        weights = weights[:, : len(keys)]
        outputs[:, head] = weights @ values[:, head // group]
    return outputs


def assert_close(found, expected, tolerance=1e-5) -> None:
    """Compares arrays in float64, within a relative and an absolute tolerance."""
    arrays = (np.asarray(array, np.float64) for array in (found, expected))
    np.testing.assert_allclose(*arrays, rtol=tolerance, atol=tolerance)
