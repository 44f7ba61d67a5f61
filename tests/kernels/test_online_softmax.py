"""Tests of the online softmax."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.dense import dense_attention

from dflash.kernels import online_softmax


def make(keys=9, seed=0):
    """Returns queries [K, B, R, H] = [1, 1, 4, 8], keys, values [1, 1, S, 8], a mask [1, 4, S]."""
    rng = np.random.default_rng(seed)
    queries, keys, values = (
        jnp.asarray(rng.normal(size=(1, 1, n, 8)).astype(jnp.float32)) for n in (4, keys, keys)
    )
    visible = jnp.asarray(rng.random((1, 4, keys.shape[2])) < 0.5).at[..., 0].set(True)
    return queries, keys, values, visible


def attend(queries, keys, values, visible):
    return online_softmax.attend(queries, keys, values, visible, scale=0.5)


def dense(queries, keys, values, visible):
    one_head = (x[0, 0][:, None] for x in (queries, keys, values))
    return dense_attention(*one_head, visible[0], 0.5)[None, None, :, 0]


@pytest.mark.parametrize("split", [1, 4, 8])
def test_two_tiles_equal_one_softmax(split):
    queries, keys, values, visible = make()
    left = attend(queries, keys[:, :, :split], values[:, :, :split], visible[..., :split])
    right = attend(queries, keys[:, :, split:], values[:, :, split:], visible[..., split:])
    expected = dense(queries, keys, values, visible)
    for a, b in ((left, right), (right, left)):
        merged = online_softmax.normalize(online_softmax.merge(a, b), jnp.float32)
        np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6)


def test_a_tile_that_no_row_sees_changes_nothing():
    queries, keys, values, visible = make()
    seen = attend(queries, keys, values, visible)
    unseen = attend(queries, keys, 1e6 * values, jnp.zeros_like(visible))
    assert not unseen.total.any()
    for merged in (online_softmax.merge(seen, unseen), online_softmax.merge(unseen, seen)):
        for name in ("peak", "total", "weighted"):
            np.testing.assert_array_equal(getattr(merged, name), getattr(seen, name))


def test_large_scores_do_not_overflow():
    queries, keys, values, visible = make()
    partial = attend(1e3 * queries, 1e3 * keys, values, visible)
    expected = dense(1e3 * queries, 1e3 * keys, values, visible)
    np.testing.assert_allclose(
        online_softmax.normalize(partial, jnp.float32), expected, rtol=1e-4, atol=1e-4
    )


def test_rows_are_ordered_by_query_then_head():
    queries = jnp.arange(2 * 3 * 4 * 1).reshape(2, 3, 4, 1)  # [B, T, N, H]
    rows = online_softmax.group_queries(queries, 2)
    assert rows.shape == (2, 2, 6, 1)
    for kv_head in range(2):
        for row in range(6):
            head = kv_head * 2 + row % 2
            np.testing.assert_array_equal(rows[kv_head, :, row], queries[:, row // 2, head])
    np.testing.assert_array_equal(online_softmax.ungroup(rows, 3), queries)


def test_accumulates_in_float32():
    queries, keys, values, visible = (
        x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in make()
    )
    partial = attend(queries, keys, values, visible)
    assert {partial.peak.dtype, partial.total.dtype, partial.weighted.dtype} == {
        jnp.dtype("float32")
    }
    assert online_softmax.normalize(partial, jnp.bfloat16).dtype == jnp.bfloat16
