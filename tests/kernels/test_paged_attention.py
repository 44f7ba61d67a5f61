"""Tests of paged attention against dense attention over whole sequences in float64."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failure
from support.dense import assert_close
from support.paged_cases import SCALE, make_case
from support.token_trees import TREES, ancestry

from dflash.kernels import paged_attention as paged

compiled = jax.jit(functools.partial(paged.paged_attention, scale=SCALE))


def run(case, tile=8, **options):
    """Compiles and runs, with small tiles, so that short sequences take several."""
    call = functools.partial(paged.paged_attention, scale=SCALE, **options)
    with mock.patch.object(paged, "TILE_TOKENS", tile):
        return jax.jit(call)(**case.arguments)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_ragged_starts_and_page_edges(length):
    # Page size 4, tile 8: empty, a single row, and lengths around the edges of pages and tiles.
    make = make_case([0, 1, 3, 4, 5, 7, 8, 9, 16, 23], length)
    make.check(run(make), 1e-5)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (4, 1), (4, 2), (8, 2)])
def test_query_heads_share_kv_heads(group, kv_heads):
    case = make_case([0, 6, 11], 3, group=group, kv_heads=kv_heads)
    case.check(run(case), 1e-5)


@pytest.mark.parametrize(("tile", "page_size"), [(1, 1), (4, 1), (256, 8), (12, 3), (1, 8)])
def test_any_page_and_tile_size(tile, page_size):
    case = make_case([0, 5, 13, 24], 4, page_size=page_size)
    case.check(run(case, tile), 1e-5)


def test_table_longer_than_the_sequences():
    # Five pages in tiles of two, so that the last tile extends past the table.
    case = make_case([0, 7, 17], 3, table_pages=5)
    case.check(run(case), 1e-5)


def test_bfloat16():
    case = make_case([0, 7, 30], 5, group=4, width=32, dtype=jnp.bfloat16)
    case.check(run(case), 2e-2)


@pytest.mark.parametrize("window", [1, 3, 9, 40])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_windows(length, window):
    case = make_case([0, 1, 4, 9, 23], length, window=window)
    case.check(run(case, window=window), 1e-5)


@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_windows_of_trees_count_depths(window):
    case = make_case([0, 9, 17], 6, tree_mask=TREES, window=window)
    case.check(run(case, window=window), 1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks(window):
    case = make_case([0, 1, 4, 9, 23], 5, group=3, sinks=True, window=window)
    case.check(run(case, window=window), 1e-5)


def test_sinks_of_trees():
    case = make_case([0, 9], 6, tree_mask=TREES[::2], sinks=True)
    case.check(run(case), 1e-5)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("length", "group", "kv_heads"), [(1, 4, 1), (16, 2, 2), (17, 1, 3)])
def test_quantized_pages(length, group, kv_heads, kv_dtype):
    """Outputs match dense attention over the dequantized rows, including the new ones."""
    case = make_case(
        [0, 1, 3, 4, 8, 9, 16, 23], length, group=group, kv_heads=kv_heads, kv_dtype=kv_dtype
    )
    case.check(run(case), 1e-5)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_trees_over_quantized_pages(kv_dtype):
    case = make_case([0, 9, 4], 6, tree_mask=TREES, kv_dtype=kv_dtype)
    case.check(run(case), 1e-5)


def test_rows_overwritten_leave_no_trace():
    """Slots with rejected rows end up as if only the last rows had been written."""
    once = make_case([2, 7], 6, table_pages=4, kv_dtype="int8")
    pages = once.arguments["key_pages"], once.arguments["value_pages"]
    wrong = once.arguments | {
        "keys": 50 * once.arguments["keys"],
        "values": -once.arguments["keys"],
    }
    _, *pages = compiled(**wrong)
    again = once.arguments | dict(zip(("key_pages", "value_pages"), pages, strict=True))
    jax.tree.map(np.testing.assert_array_equal, compiled(**again), compiled(**once.arguments))


@settings(max_examples=30)
@given(st.data())
def test_any_lengths_and_trees(data):
    starts = data.draw(st.lists(st.integers(0, 19), min_size=3, max_size=3))
    parents = [[data.draw(st.integers(0, g)) for g in range(4)] for _ in starts]
    trees = np.stack([ancestry(tree) for tree in parents])
    seed = data.draw(st.integers(0, 99))
    case = make_case(starts, 5, table_pages=6, tree_mask=trees, seed=seed)
    with mock.patch.object(paged, "TILE_TOKENS", 8):  # It is read once, while tracing.
        result = compiled(**case.arguments)
    case.check(result, 1e-5)


def test_idle_sequences_touch_scratch_alone():
    case = make_case([0, 6], 3)
    case.arguments["page_table"] = case.arguments["page_table"].at[0].set(0)
    outputs, *pools = run(case)
    for after, name in zip(pools, ("key_pages", "value_pages"), strict=True):
        changed = np.any(after != case.arguments[name], axis=(0, 2, 3))
        mine = set(case.pages[1].tolist())
        assert set(np.flatnonzero(changed).tolist()) == {0} | mine
    # Three sequences share the scratch page, but their outputs are independent.
    np.testing.assert_allclose(outputs, case.expected, rtol=1e-5, atol=1e-5)


def test_new_rows_become_context():
    """Two calls of three rows have the same results as one call of six."""
    whole = make_case([2, 7], 6, table_pages=4)
    everything, *whole_pages = run(whole)

    def part(rows, start, pages):
        arguments = dict(whole.arguments)
        for name in ("queries", "keys", "values"):
            arguments[name] = np.asarray(arguments[name])[:, rows]
        arguments["start"] = arguments["start"] + start
        arguments["key_pages"], arguments["value_pages"] = pages
        return run(dataclasses.replace(whole, arguments=arguments))

    pages = [whole.arguments[name] for name in ("key_pages", "value_pages")]
    first, *pages = part(slice(0, 3), 0, pages)
    second, *pages = part(slice(3, 6), 3, pages)
    assert_close(np.concatenate([first, second], axis=1), everything)
    jax.tree.map(np.testing.assert_array_equal, pages, whole_pages)


WRONG_SHAPES = {
    "keys": ((2, 3, 4, 8), "keys is (2, 3, 4, 8), expected (2, 3, 2, 8)"),
    "values": ((2, 2, 2, 8), "values is (2, 2, 2, 8), expected (2, 3, 2, 8)"),
    "value_pages": ((2, 8, 4, 4), "value_pages is (2, 8, 4, 4), expected (2, 8, 4, 8)"),
    "page_table": ((3, 3), "page_table is (3, 3), expected (2, 3)"),
    "start": ((3,), "start is (3,), expected (2,)"),
    "tree_mask": ((3, 3), "tree_mask is (3, 3), expected (2, 3, 3)"),
    "sinks": ((3,), "sinks is (3,), expected (4,)"),
    "queries": ((2, 3, 3, 8), "queries (2, 3, 3, 8) do not fit key_pages (2, 8, 4, 8)"),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shapes_are_named(name):
    case = make_case([5, 7], 3, group=2)
    shape, message = WRONG_SHAPES[name]
    case.arguments[name] = jnp.zeros(shape, case.arguments.get(name, jnp.zeros(0, bool)).dtype)
    assert failure(run, case, kind=ValueError) == f"paged_attention: {message}"


def test_scales_must_fit_their_pages():
    case = make_case([5, 7], 3, kv_dtype="int8")
    pages = case.arguments["value_pages"]
    case.arguments["value_pages"] = dataclasses.replace(pages, scales=pages.scales.mT)
    message = "value_pages.scales is (2, 8, 4, 1), expected (2, 8, 1, 4)"
    assert message in failure(run, case, kind=ValueError)


def test_write_rows_casts_to_the_pool():
    pages = jnp.zeros((1, 2, 2, 1), jnp.bfloat16)
    rows = jnp.array([1.0, 2.0]).reshape(1, 1, 2, 1)
    written = paged.write_rows(pages, jnp.array([[3, 0]]), rows)
    assert written.dtype == jnp.bfloat16
    np.testing.assert_array_equal(written[0, :, :, 0], [[2, 0], [0, 1]])


def test_move_rows_reads_before_it_writes():
    pages = jnp.arange(2 * 8.0).reshape(2, 2, 4, 1)
    moved = paged.move_rows(pages, jnp.array([[2, 3, 7]]), jnp.array([[1, 2, 3]]))
    np.testing.assert_array_equal(moved[0].ravel(), [0, 2, 3, 7, 4, 5, 6, 7])
    np.testing.assert_array_equal(moved[1].ravel(), [8, 10, 11, 15, 12, 13, 14, 15])
