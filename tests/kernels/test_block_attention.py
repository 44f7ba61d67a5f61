"""Tests of block attention against dense attention in float64."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failure
from support.dense import assert_close, dense_attention
from support.interpreter import interpret

from dflash.kernels import block_attention as block
from dflash.kernels import flash_tpu
from dflash.kernels.tuning import BlockSizes

SCALE = 0.3
STALE = 1e6  # Value of rows past the length, which must not affect any output.


def make_case(
    lengths, rows, *, capacity=None, group=2, kv_heads=2, width=8, dtype=jnp.float32, seed=0,
    sinks=False,
):  # fmt: skip
    """Returns random arguments, by name; context past the lengths is stale."""
    rng = np.random.default_rng(seed)
    batch, capacity = len(lengths), capacity or max(lengths)
    past = np.arange(capacity) >= np.asarray(lengths)[:, None]

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(dtype))

    def draw_context():
        rows = rng.normal(size=(batch, kv_heads, capacity, width))
        return jnp.asarray(np.where(past[:, None, :, None], STALE, rows).astype(dtype))

    return {
        "queries": draw(batch, rows, kv_heads * group, width),
        "keys": draw(batch, rows, kv_heads, width),
        "values": draw(batch, rows, kv_heads, width),
        "context_keys": draw_context(),
        "context_values": draw_context(),
        "length": jnp.asarray(lengths, jnp.int32),
        **({"sinks": 2 * draw(kv_heads * group)} if sinks else {}),
    }


def expected(case, *, window=None, causal=False):
    """Computes the outputs by loops, from an explicit list of visible positions."""
    outputs = []
    # Not on the device, where each shape of an index compiles a program.
    case = {name: np.asarray(value) for name, value in case.items()}
    rows = case["queries"].shape[1]
    chosen = case.get("windows", np.full(case["length"].shape, 2**30)).tolist()
    for b, length in enumerate(case["length"].tolist()):
        context_window = min(window or 2**30, chosen[b])
        keys = np.concatenate([case["context_keys"][b].swapaxes(0, 1)[:length], case["keys"][b]])
        values = np.concatenate(
            [case["context_values"][b].swapaxes(0, 1)[:length], case["values"][b]]
        )
        visible = np.zeros((rows, length + rows), bool)
        for row in range(rows):
            for position in range(length):
                visible[row, position] = position > length + row - context_window
            for other in range(rows):
                near = window is None or abs(other - row) < window
                visible[row, length + other] = near and (other <= row or not causal)
        sinks = case.get("sinks")
        outputs.append(dense_attention(case["queries"][b], keys, values, visible, SCALE, sinks))
    return np.stack(outputs)


def check(case, *, tile=8, tolerance=1e-5, unread=slice(0), **view):
    """Compares with `expected`; tiles that must not be read (`unread`) hold NaN."""
    reference = expected(case, **view)
    for name in ("context_keys", "context_values"):
        context = np.array(case[name])
        context[:, :, unread] = np.nan
        case[name] = jnp.asarray(context)
    with mock.patch.object(block, "TILE_TOKENS", tile):
        call = jax.jit(functools.partial(block.block_attention, scale=SCALE, **view))
        outputs = call(**case)
    assert outputs.dtype == case["queries"].dtype
    assert_close(outputs, reference, tolerance)


@pytest.mark.parametrize(("rows", "capacity"), [(1, 24), (2, 27), (16, 27)])  # In tiles of 8.
def test_ragged_lengths(rows, capacity):
    check(make_case([0, 1, 7, 8, 9, 16, 17, 24], rows, capacity=capacity))


@pytest.mark.parametrize(
    ("window", "causal"), [(None, True), (1, False), (3, True), (8, False), (100, False)]
)
def test_views(window, causal):
    check(make_case([0, 2, 9, 21, 23], 4, capacity=23), window=window, causal=causal)


def test_tiles_before_every_window_are_not_read():
    check(make_case([19, 22], 3, capacity=24), window=3, unread=slice(0, 16))


def test_tiles_past_every_length_are_not_read():
    check(make_case([3, 8], 3, capacity=24), unread=slice(8, 24))


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (4, 2), (8, 1)])
def test_query_heads_share_kv_heads(group, kv_heads):
    check(make_case([5, 12], 3, capacity=13, group=group, kv_heads=kv_heads))


@pytest.mark.parametrize("tile", [1, 5, 13, 256])
def test_any_tile_size(tile):
    check(make_case([0, 5, 13], 3, capacity=13), tile=tile, window=6)


def test_sinks():
    check(make_case([0, 5, 13], 3, capacity=13, group=3, sinks=True), window=6)
    wrong = make_case([3], 2) | {"sinks": jnp.zeros(3)}
    with pytest.raises(ValueError, match=r"sinks is \(3,\), expected \(4,\)"):
        block.block_attention(**wrong, scale=SCALE)


WINDOWS = {"windows": jnp.array([6, 30, 2**30, 11, 3])}


@pytest.mark.parametrize("view", [{}, {"window": 9}, {"causal": True}], ids=str)
def test_windows_of_the_sequences(view):
    check(make_case([0, 2, 9, 21, 23], 3, capacity=23) | WINDOWS, **view)


def test_tiles_before_the_windows_of_all_sequences_are_not_read():
    case = make_case([19, 22], 3, capacity=24) | {"windows": jnp.array([3, 5])}
    check(case, unread=slice(0, 16))


def test_wrong_windows_are_named():
    wrong = make_case([3], 2) | {"windows": jnp.array([3, 5])}
    with pytest.raises(ValueError, match=r"windows is \(2,\), expected \(1,\)"):
        block.block_attention(**wrong, scale=SCALE)


def test_bfloat16():
    case = make_case([0, 7, 30], 5, group=4, width=32, dtype=jnp.bfloat16)
    check(case, tolerance=2e-2)


@functools.cache
def compiled(window, causal):
    return jax.jit(
        functools.partial(block.block_attention, scale=SCALE, window=window, causal=causal)
    )


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 21), min_size=3, max_size=3),
    window=st.sampled_from([None, 7]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_lengths(lengths, window, causal, seed):
    case = make_case(lengths, 4, capacity=21, seed=seed)
    with mock.patch.object(block, "TILE_TOKENS", 8):  # It is read while tracing.
        outputs = compiled(window, causal)(**case)
    assert_close(outputs, expected(case, window=window, causal=causal))


WRONG_SHAPES = {
    "keys": ((2, 4, 2, 8), "keys is (2, 4, 2, 8), expected (2, 3, 2, 8)"),
    "values": ((2, 3, 1, 8), "values is (2, 3, 1, 8), expected (2, 3, 2, 8)"),
    "context_keys": ((2, 2, 9, 4), "context_keys is (2, 2, 9, 4), expected (2, 2, 9, 8)"),
    "context_values": ((2, 2, 8, 8), "context_values is (2, 2, 8, 8), expected (2, 2, 9, 8)"),
    "length": ((1,), "length is (1,), expected (2,)"),
    "queries": ((2, 3, 5, 8), "5 query heads, expected a multiple of 2 kv heads"),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shapes_are_named(name):
    case = make_case([5, 7], 3, capacity=9)
    shape, message = WRONG_SHAPES[name]
    case[name] = jnp.zeros(shape, case[name].dtype)
    said = failure(block.block_attention, kind=ValueError, **case, scale=SCALE)
    assert said == f"block_attention: {message}"


def check_kernel(case, **view):
    """Checks the kernel in interpret mode; rows past the length's memory tile are NaN."""
    reference = expected(case, **view)
    dtype = case["context_keys"].dtype
    unit = flash_tpu.row_tile(dtype)
    for name in ("context_keys", "context_values"):
        positions = np.arange(case[name].shape[2])
        past = positions >= -(-np.asarray(case["length"])[:, None] // unit) * unit
        case[name] = jnp.where(past[:, None, :, None], jnp.nan, case[name]).astype(dtype)
    call = functools.partial(
        block.block_attention,
        scale=SCALE,
        implementation="interpret",
        sizes=BlockSizes(16, 128),
        **view,
    )
    outputs = interpret(lambda case: call(**case), case)
    assert_close(outputs, reference, 2e-2 if dtype == jnp.bfloat16 else 2e-5)


@pytest.mark.parametrize(
    ("rows", "lengths", "dtype", "kv_heads", "group", "width", "view"),
    [
        (1, [0, 15, 40], jnp.float32, 1, 4, 64, {}),
        (2, [48, 1, 0], jnp.bfloat16, 1, 8, 128, {"causal": True}),
        (15, [17, 16], jnp.float32, 3, 1, 64, {"window": 5}),
        (16, [33, 0, 32], jnp.bfloat16, 2, 4, 128, {}),
        (17, [47, 8], jnp.float32, 1, 1, 256, {"window": 30, "causal": True}),
        (64, [9], jnp.float32, 1, 1, 64, {}),
    ],
)
def test_kernel(rows, lengths, dtype, kv_heads, group, width, view):
    case = make_case(
        lengths, rows, capacity=48, kv_heads=kv_heads, group=group, width=width, dtype=dtype
    )
    check_kernel(case, **view)


@pytest.mark.parametrize("sinks", [False, True])
def test_kernel_with_windows_of_the_sequences(sinks):
    lengths, width = [0, 2, 9, 40, 33], 64
    case = make_case(lengths, 3, capacity=48, kv_heads=2, group=2, width=width, sinks=sinks)
    check_kernel(case | WINDOWS, window=20)


def test_what_vmem_cannot_hold_is_refused_with_its_sizes():
    case = make_case([3], 16, width=128, capacity=32)
    with pytest.raises(
        ValueError, match=r"^block_attention: needs .* MiB of VMEM, more than 56: .*scores"
    ):
        block.block_attention(
            **{**case, "queries": jnp.zeros((1, 16, 2 * 2048, 128))},
            scale=SCALE,
            implementation="interpret",
        )


def test_what_the_kernel_does_not_cover():
    case = make_case([3], 2, width=64, capacity=30)
    with pytest.raises(ValueError, match="a context of 30 rows, expected a multiple of 8"):
        block.block_attention(**case, scale=SCALE, implementation="pallas")


def test_branches_see_what_they_descend_of():
    """Each of a few queries sees some of the more numerous drafted rows, and the context."""
    lengths, queries, drafted = [0, 5, 13], 3, 7
    case = make_case(lengths, drafted, capacity=13)
    case["queries"] = case["queries"][:, :queries]
    visible = np.random.default_rng(1).random((3, queries, drafted)) < 0.5
    visible[..., 2] = True
    with mock.patch.object(block, "TILE_TOKENS", 8):
        run = jax.jit(functools.partial(block.branch_attention, scale=SCALE))
        outputs = run(**case, visible=visible)
    for b, length in enumerate(lengths):
        context = (
            case[f"context_{name}"][b].swapaxes(0, 1)[:length] for name in ("keys", "values")
        )
        rows = (case[name][b] for name in ("keys", "values"))
        keys, values = (np.concatenate(pair) for pair in zip(context, rows, strict=True))
        seen = np.concatenate([np.ones((queries, length), bool), visible[b]], axis=1)
        wanted = dense_attention(case["queries"][b], keys, values, seen, SCALE)
        assert_close(outputs[b], wanted)
    for name, message in [
        ("visible", r"branch_attention: visible is \(3, 3, 6\), expected \(3, 3, 7\)"),
        ("values", r"branch_attention: values is \(3, 6, 2, 8\), expected \(3, 7, 2, 8\)"),
    ]:
        wrong = {**case, "visible": visible}
        wrong[name] = wrong[name][..., :6] if name == "visible" else wrong[name][:, :6]
        with pytest.raises(ValueError, match=message):
            block.branch_attention(**wrong, scale=SCALE)
