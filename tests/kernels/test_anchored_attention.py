"""Tests of the training form of block attention, against plain loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failure
from support.dense import assert_close, dense_attention
from support.interpreter import interpret
from support.jaxprs import largest_array

from dflash.kernels.anchored_attention import anchored_attention
from dflash.kernels.block_attention import block_attention
from dflash.kernels.tuning import BlockSizes

SCALE = 0.3
LENGTH, BLOCK = 19, 3
FLOATS = ("queries", "keys", "values", "context_keys", "context_values")


def make_case(
    anchors, segments, *, valid=None, group=2, kv_heads=2, width=8, dtype=jnp.float32, seed=0
):
    """Returns random arguments, by name."""
    rng = np.random.default_rng(seed)
    anchors, segments = np.asarray(anchors, np.int32), np.asarray(segments, np.int32)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(dtype))

    blocks, context = (*anchors.shape, BLOCK, kv_heads, width), (*segments.shape, kv_heads, width)
    return {
        "queries": draw(*anchors.shape, BLOCK, kv_heads * group, width), "keys": draw(*blocks),
        "values": draw(*blocks), "context_keys": draw(*context), "context_values": draw(*context),
        "anchors": jnp.asarray(anchors),
        "valid": jnp.asarray(np.ones(anchors.shape, bool) if valid is None else valid),
        "segment_ids": jnp.asarray(segments),
    }  # fmt: skip


def visible_keys(row, anchor, window, causal):
    """Returns the positions before a block in its document, and the mask of keys by its rows."""
    seen = [p for p in range(anchor) if row[p] == row[anchor]]
    keys = np.array([*seen, *range(anchor, anchor + BLOCK)])
    place = anchor + np.arange(BLOCK)[:, None]
    visible = (keys <= place) | (not causal) | (keys < anchor)
    near = window is None or np.abs(place - keys) < window
    return np.array(seen, int), visible & near


def expected(case, *, window=None, causal=False):
    """Computes the outputs block by block, from an explicit list of visible keys."""
    # Not on the device, where each shape of an index compiles a program.
    case = {name: np.asarray(value) for name, value in case.items()}
    outputs = np.zeros(case["queries"].shape)
    for b, row in enumerate(case["segment_ids"]):
        for j, anchor in enumerate(case["anchors"][b].tolist()):
            if not case["valid"][b, j]:
                continue
            seen, visible = visible_keys(row, anchor, window, causal)
            keys, values = (
                np.concatenate([case[f"context_{name}"][b, seen], case[name][b, j]])
                for name in ("keys", "values")
            )
            outputs[b, j] = dense_attention(case["queries"][b, j], keys, values, visible, SCALE)
    return outputs


def split(case):
    """Returns the arguments that have gradients, and the others."""
    floats = {name: case[name] for name in FLOATS}
    return floats, {name: array for name, array in case.items() if name not in FLOATS}


def check(case, *, tolerance=1e-5, group_blocks=2, **view):
    call = functools.partial(anchored_attention, scale=SCALE, group_blocks=group_blocks, **view)
    outputs = jax.jit(call)(**case)
    assert outputs.dtype == case["queries"].dtype
    assert_close(outputs, expected(case, **view), tolerance)


ONE = [1] * LENGTH
PACKED = [1] * 6 + [2] * 9 + [0] * 4


@pytest.mark.parametrize(
    ("window", "causal"), [(None, True), (1, False), (3, True), (8, False), (100, False)]
)
def test_views(window, causal):
    check(
        make_case([[0, 2, 9, 14, 18], [5, 6, 8, 11, 14]], [ONE, PACKED]),
        window=window,
        causal=causal,
    )


@pytest.mark.parametrize("group_blocks", [1, 2, 5, 64])
def test_any_group_size(group_blocks):
    check(make_case([[3, 0, 18, 7, 9]], [ONE]), group_blocks=group_blocks)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (4, 2), (8, 1)])
def test_query_heads_share_kv_heads(group, kv_heads):
    check(make_case([[3, 0, 18]], [PACKED], group=group, kv_heads=kv_heads))


def test_invalid_blocks_are_zero_and_reach_no_gradient():
    case = make_case([[4, 0, 9], [0, 0, 0]], [ONE, [0] * LENGTH], valid=[[1, 0, 1], [0, 0, 0]])
    case["valid"] = case["valid"].astype(bool)
    check(case)
    for name in ("queries", "keys", "values"):
        case[name] = case[name].at[0, 1].set(1e4)
    outputs = np.asarray(_forward(None, False)(**case))
    assert not outputs[~np.asarray(case["valid"])].any()
    for name, grad in gradients(case, None, False).items():
        assert np.isfinite(grad).all(), name
        if grad.shape[:2] == case["valid"].shape:
            assert not grad[~np.asarray(case["valid"])].any(), name
    assert not gradients(case, None, False)["context_keys"][1].any()


def test_bfloat16():
    check(make_case([[0, 5, 6, 7, 14]], [PACKED], dtype=jnp.bfloat16), tolerance=3e-2)


@pytest.mark.parametrize("sinks", [None, jnp.asarray([0.5, -1.0, 2.0, 0.0])])
def test_equals_block_attention_of_the_decode_loop(sinks):
    case = make_case([[0, 4, 11, 18]], [ONE])
    view = {"sinks": sinks, "scale": SCALE, "window": 6}
    outputs = jax.jit(functools.partial(anchored_attention, **view))(**case)
    case = {name: np.asarray(value) for name, value in case.items()}
    decode = jax.jit(functools.partial(block_attention, **view))
    for j, anchor in enumerate(case["anchors"][0]):
        decoded = decode(
            *(case[name][:, j] for name in ("queries", "keys", "values")),
            *(case[f"context_{name}"].swapaxes(1, 2) for name in ("keys", "values")),
            anchor[None],
        )
        np.testing.assert_allclose(outputs[:, j], decoded, rtol=1e-5, atol=1e-5)


def naive(
    queries, keys, values, context_keys, context_values, anchors, valid, segment_ids, window, causal
):
    """Computes the outputs with a single mask over all keys, for its gradients."""
    batch, blocks, block, heads, width = queries.shape
    positions = jnp.arange(segment_ids.shape[1])
    document = jnp.take_along_axis(segment_ids, anchors, axis=1)[..., None]
    context = (positions < anchors[..., None]) & (segment_ids[:, None] == document)
    context = jnp.repeat(context, block, axis=1)
    own = jnp.tri(block, dtype=bool) if causal else jnp.ones((block, block), bool)
    if window is not None:
        place = (anchors[..., None] + jnp.arange(block)).reshape(batch, -1)
        context &= place[..., None] - positions < window
        far = jnp.tri(block, k=-window, dtype=bool)
        own &= ~(far | far.T)
    own = jnp.kron(jnp.eye(blocks, dtype=int), own.astype(int)) != 0
    mask = jnp.concatenate([context, jnp.broadcast_to(own, (batch, *own.shape))], axis=-1)
    rows = queries.reshape(batch, -1, heads, width)
    all_keys, all_values = (
        jnp.concatenate([old, new.reshape(batch, -1, *new.shape[3:])], axis=1)
        for old, new in ((context_keys, keys), (context_values, values))
    )
    share = heads // keys.shape[3]
    scores = SCALE * jnp.einsum("btnh,bsnh->bnts", rows, jnp.repeat(all_keys, share, axis=2))
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf))
    outputs = jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(all_values, share, axis=2))
    return jnp.where(valid[:, :, None, None, None], outputs.reshape(queries.shape), 0)


@functools.cache
def _gradient(kind, window, causal):
    def total(floats, rest):
        if kind == "naive":
            outputs = naive(**floats, **rest, window=window, causal=causal)
        else:
            outputs = anchored_attention(
                **floats, **rest, scale=SCALE, window=window, causal=causal, group_blocks=2
            )
        return jnp.sum(jnp.sin(outputs))

    return jax.jit(jax.grad(total))


def gradients(case, window, causal, kind="ours"):
    return _gradient(kind, window, causal)(*split(case))


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    padding=st.integers(0, 8),
    view=st.sampled_from([(None, False), (4, True)]),
    seed=st.integers(0, 999),
)
def test_any_blocks(lengths, padding, view, seed):
    window, causal = view
    rng = np.random.default_rng(seed)
    row = np.repeat(np.arange(len(lengths)) + 1, lengths)[: LENGTH - padding]
    row = np.pad(row, (0, LENGTH - len(row)))
    anchors = rng.integers(0, LENGTH, (2, 5))
    anchors[0, :2] = 0, LENGTH - 1
    case = make_case(anchors, [row, ONE], valid=rng.random((2, 5)) < 0.8, seed=seed)
    outputs = _forward(window, causal)(**case)
    assert_close(outputs, expected(case, window=window, causal=causal))
    theirs = gradients(case, window, causal, "naive")
    for name, ours in gradients(case, window, causal).items():
        np.testing.assert_allclose(ours, theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)


@functools.cache
def _forward(window, causal):
    return jax.jit(
        functools.partial(
            anchored_attention, scale=SCALE, window=window, causal=causal, group_blocks=2
        )
    )


def test_scores_are_never_whole():
    blocks, length = 64, 256
    case = make_case(np.arange(blocks)[None] * 4, np.ones((1, length)))
    whole = case["queries"].shape[3] * blocks * BLOCK * length
    floats, rest = split(case)

    def total(floats):
        return jnp.sum(anchored_attention(**floats, **rest, scale=SCALE, group_blocks=4))

    assert largest_array(jax.grad(total), floats) <= whole // 8
    assert largest_array(lambda: naive(**case, window=None, causal=False)) >= whole


WRONG_SHAPES = {
    "keys": ((2, 3, 4, 2, 8), "keys is (2, 3, 4, 2, 8), expected (2, 3, 3, 2, 8)"),
    "values": ((2, 2, 3, 2, 8), "values is (2, 2, 3, 2, 8), expected (2, 3, 3, 2, 8)"),
    "context_keys": ((2, 18, 2, 8), "context_keys is (2, 18, 2, 8), expected (2, 19, 2, 8)"),
    "context_values": ((2, 19, 1, 8), "context_values is (2, 19, 1, 8), expected (2, 19, 2, 8)"),
    "anchors": ((2, 2), "anchors is (2, 2), expected (2, 3)"),
    "valid": ((2, 4), "valid is (2, 4), expected (2, 3)"),
    "segment_ids": ((3, 19), "segment_ids is (3, 19), expected (2, 19)"),
    "queries": ((2, 3, 3, 5, 8), "5 query heads, expected a multiple of 2 kv heads"),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shapes_are_named(name):
    case = make_case([[0, 1, 2], [3, 4, 5]], [ONE, ONE])
    shape, message = WRONG_SHAPES[name]
    case[name] = jnp.zeros(shape, case[name].dtype)
    said = failure(anchored_attention, kind=ValueError, **case, scale=SCALE)
    assert said == f"anchored_attention: {message}"


def in_interpret_mode(case, queries, window, causal):
    """Returns outputs and gradients of the kernels, with race detection in both passes."""
    call = functools.partial(
        anchored_attention, scale=SCALE, window=window, causal=causal, implementation="interpret",
        sizes=BlockSizes(8, queries),
    )  # fmt: skip
    floats, rest = split(case)

    def total(floats):
        return jnp.sum(jnp.sin(call(**floats, **rest).astype(jnp.float32)))

    return interpret(lambda case: call(**case), case), interpret(jax.grad(total), floats)


@pytest.mark.parametrize(
    ("kv_heads", "group", "width", "dtype", "window", "causal"),
    [
        (1, 4, 64, jnp.float32, None, False),
        (2, 1, 128, jnp.float32, 4, True),
        (1, 8, 128, jnp.bfloat16, None, False),
    ],
)
def test_kernel(kv_heads, group, width, dtype, window, causal):
    # Two grid steps of eight blocks in float32, or one of sixteen in bfloat16.
    anchors = [[0, 5, 6, 14, 15, *range(5)], [1, 6, 9, 12, 18, *range(2, 12, 2)]]
    valid = np.ones((2, 10), bool)
    valid[0, 4] = valid[1, 1] = valid[1, 9] = False
    sizes = {"kv_heads": kv_heads, "group": group, "width": width, "dtype": dtype}
    case = make_case(anchors, [PACKED, ONE], valid=valid, **sizes)
    outputs, grads = in_interpret_mode(case, 2 * group * BLOCK, window, causal)
    tolerance = 3e-2 if dtype == jnp.bfloat16 else 2e-5
    assert_close(outputs, expected(case, window=window, causal=causal), tolerance)
    wide = {k: v.astype(jnp.float32) if k in FLOATS else v for k, v in case.items()}
    for name, theirs in gradients(wide, window, causal, "naive").items():
        assert_close(grads[name], theirs, 5 * tolerance)


def test_what_vmem_cannot_hold_is_refused_with_its_sizes():
    shapes = {
        name: jax.ShapeDtypeStruct((1, 1 << 17, *array.shape[2:]), array.dtype)
        if array.shape[1] == LENGTH
        else array
        for name, array in make_case([[4]], [ONE], width=128).items()
    }

    def total(case):
        return anchored_attention(**case, scale=SCALE, implementation="interpret").sum()

    gradient = jax.grad(lambda floats, rest: total(floats | rest))
    with pytest.raises(ValueError, match=r"^anchored_attention: needs .*gradient of the context"):
        jax.eval_shape(gradient, *split(shapes))
