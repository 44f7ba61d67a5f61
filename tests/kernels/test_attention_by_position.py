"""Attention by position: a row has the same bits wherever its block begins.

Blocks of one sequence begin at different positions, so each row is appended as another row of its
block and its last keys come once from the cache, once from the same call.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.interpreter import interpret

from dflash.kernels import quantized
from dflash.kernels.paged_attention import paged_attention
from dflash.kernels.quantized import Quantized
from dflash.kernels.tuning import BlockSizes

LENGTH, ROWS, KV_HEADS, GROUP, WIDTH = 256, 8, 1, 2, 64


@functools.cache
def sequence(dtype):
    """Queries, keys and values of every position, each [1, L, heads, H]."""
    draws = np.random.default_rng(0).normal(size=(3, 1, LENGTH, KV_HEADS * GROUP, WIDTH))
    queries, keys, values = jnp.asarray(draws, dtype)
    return queries, keys[:, :, :KV_HEADS], values[:, :, :KV_HEADS]


def pool(rows, page, start, kv_dtype, stale):
    """Pages in order, with the rows below `start`; the others are stale."""
    rows = rows.reshape(-1, page, KV_HEADS, WIDTH).transpose(2, 0, 1, 3)
    known = jnp.arange(LENGTH).reshape(-1, page, 1) < start
    if kv_dtype is None:
        return jnp.where(known, rows, stale)
    stored = quantized.encode(rows, Quantized(jnp.zeros(0, kv_dtype), jnp.zeros(0)))
    values = jnp.where(known, stored.values, jnp.zeros_like(stored.values))
    return Quantized(values, jnp.where(known.mT, stored.scales, stale))


@functools.cache
def compiled(page, window, implementation):
    """Attention as one function, which is compiled once for all starts."""
    options = {"scale": 0.3, "window": window, "by_position": True}
    call = functools.partial(
        paged_attention, implementation=implementation, sizes=BlockSizes(page, 128), **options
    )
    return jax.jit(lambda given: call(**given))


def attend(start, *, dtype, kv_dtype=None, window=None, implementation="reference"):
    """Outputs [T, N, H] of the block that begins at `start`."""
    queries, keys, values = sequence(dtype)
    own = slice(start, start + ROWS)
    page = 128 if kv_dtype else 32  # The kernel copies the scales of a whole page.
    # The kernel clears stale rows, which may hold anything; the reference weighs them by zero.
    stale = jnp.nan if implementation == "interpret" else 1e6
    arguments = {
        "queries": queries[:, own],
        "keys": keys[:, own],
        "values": values[:, own],
        "key_pages": pool(keys, page, start, kv_dtype, stale),
        "value_pages": pool(values, page, start, kv_dtype, stale),
        "page_table": jnp.arange(LENGTH // page, dtype=jnp.int32)[None],
        "start": jnp.array([start], jnp.int32),
    }
    call = compiled(page, window, implementation)
    run = interpret if implementation == "interpret" else lambda call, given: call(given)
    outputs, *_ = run(call, arguments)
    return np.asarray(outputs)[0]


def check(starts, **how):
    """Compares the rows that several blocks share, bit for bit."""
    rows = {}
    for start in starts:
        for position, output in enumerate(attend(start, **how), start):
            same = rows.setdefault(position, output)
            np.testing.assert_array_equal(output, same, err_msg=f"{start}, {position}")
    assert len(rows) < ROWS * len(starts)
    assert all(np.isfinite(output.astype(np.float32)).all() for output in rows.values())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_the_reference(dtype, window):
    check([0, 3, 13, 16, 18, 24, 29, 31, 32, 33, 60, 66], dtype=dtype, window=window)


@pytest.mark.parametrize(
    ("kv_dtype", "window"), [(None, None), (None, 20), (jnp.int8, None)], ids=str
)
def test_the_kernel(kv_dtype, window):
    starts = [0, 5, 29, 31, 32, 62, 66] if kv_dtype is None else [0, 3, 121, 127, 128]
    how = {"kv_dtype": kv_dtype, "window": window, "implementation": "interpret"}
    check(starts, dtype=jnp.bfloat16, **how)


def test_outputs_are_those_of_any_order():
    from_position = attend(29, dtype=jnp.float32)
    kernel = attend(29, dtype=jnp.float32, implementation="interpret")
    queries, keys, values = sequence(jnp.float32)
    scores = 0.3 * jnp.einsum("bqgh,bkh->bgqk", queries[:, 29:37], keys[:, :, 0])
    visible = jnp.arange(LENGTH) <= 29 + jnp.arange(ROWS)[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    dense = jnp.einsum("bgqk,bkh->bqgh", weights, values[:, :, 0])[0]
    for outputs in (from_position, kernel):
        np.testing.assert_allclose(outputs, dense, rtol=1e-5, atol=1e-5)
