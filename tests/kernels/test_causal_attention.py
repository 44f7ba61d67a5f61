"""Tests of causal attention over packed documents, against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failure
from support.dense import assert_close, dense_attention
from support.jaxprs import largest_array

from dflash.kernels import causal_attention_tpu
from dflash.kernels.causal_attention import causal_attention

SCALE = 0.3
LENGTH = 21
# Lengths of documents and padding: ids count up from 1, None is padding.
LAYOUTS = {
    "one document": [(1, 21)],
    "two and padding": [(1, 9), (2, 7), (0, 5)],
    "single tokens": [(1, 1), (2, 1), (3, 19)],
    "padding first": [(0, 4), (1, 17)],
    "padding alone": [(0, 21)],
}


def make_segments(*layouts):
    return np.stack(
        [np.concatenate([np.full(n, i) for i, n in layout]) for layout in layouts]
    ).astype(np.int32)


def make_case(segments, *, group=2, kv_heads=2, width=8, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    batch, length = segments.shape

    def draw(heads):
        return jnp.asarray(rng.normal(size=(batch, length, heads, width)).astype(dtype))

    return draw(group * kv_heads), draw(kv_heads), draw(kv_heads), jnp.asarray(segments)


def expected(queries, keys, values, segments, window=None, sinks=None):
    """Computes the outputs row by row; padding rows are zero."""
    # Not on the device, where each shape of an index compiles a program.
    queries, keys, values, segments = map(np.asarray, (queries, keys, values, segments))
    outputs = np.zeros(queries.shape)
    for b, row in enumerate(segments):
        for t in np.flatnonzero(row):
            first = 0 if window is None else max(0, t + 1 - window)
            seen = [s for s in range(first, t + 1) if row[s] == row[t]]
            outputs[b, t] = dense_attention(
                queries[b, t : t + 1], keys[b, np.array(seen)], values[b, np.array(seen)],
                np.ones((1, len(seen)), bool), SCALE, sinks,
            )[0]  # fmt: skip
    return outputs


def check(case, *, tolerance=1e-5, **options):
    outputs = jax.jit(functools.partial(causal_attention, scale=SCALE, **options))(*case)
    assert outputs.dtype == case[0].dtype
    outputs = np.asarray(outputs, np.float64)
    assert np.isfinite(outputs).all()
    real = np.asarray(case[3]) != 0
    dense = expected(*case, options.get("window"), options.get("sinks"))
    assert_close(outputs[real], dense[real], tolerance)


@pytest.mark.parametrize("chunk", [4, 21, None])
def test_packed_documents(chunk):
    check(make_case(make_segments(*LAYOUTS.values())), chunk_tokens=chunk)


@pytest.mark.parametrize("window", [1, 5, 30])
def test_windows(window):
    check(make_case(make_segments(*LAYOUTS.values())), chunk_tokens=4, window=window)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks(window):
    case = make_case(make_segments(*LAYOUTS.values()))
    sinks = jnp.asarray([2.0, -1.0, 0.0, 5.0])
    check(case, chunk_tokens=4, window=window, sinks=sinks)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (4, 2), (8, 1)])
def test_query_heads_share_kv_heads(group, kv_heads):
    segments = make_segments(LAYOUTS["two and padding"])
    check(make_case(segments, group=group, kv_heads=kv_heads), chunk_tokens=8)


def test_bfloat16():
    check(make_case(make_segments(*LAYOUTS.values()), dtype=jnp.bfloat16), tolerance=3e-2)


def naive(queries, keys, values, segments):
    """Computes the outputs from all scores at once, for its gradients."""
    share = queries.shape[2] // keys.shape[2]
    keys, values = (jnp.repeat(array, share, axis=2) for array in (keys, values))
    visible = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(
        segments.shape[1], dtype=bool
    )
    scores = SCALE * jnp.einsum("btnh,bsnh->bnts", queries, keys)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, values)


@functools.cache
def gradients(function):
    def total(queries, keys, values, segments):
        outputs = function(queries, keys, values, segments)
        return jnp.sum(jnp.sin(outputs) * (segments != 0)[..., None, None])

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))


chunked = functools.partial(causal_attention, scale=SCALE, chunk_tokens=6)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    padding=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_gradients(lengths, padding, seed):
    rows = np.repeat(np.arange(len(lengths)) + 1, lengths)[: LENGTH - padding]
    segments = np.zeros((2, LENGTH), np.int32)
    segments[0, : len(rows)] = rows
    segments[1] = 1
    case = make_case(segments, seed=seed)
    for ours, theirs in zip(gradients(chunked)(*case), gradients(naive)(*case), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_scores_are_never_whole():
    case = make_case(make_segments([(1, 256)]))

    def total(*arrays):
        return jnp.sum(causal_attention(*arrays, case[3], scale=SCALE, chunk_tokens=32))

    heads, whole = case[0].shape[2], 256 * 256
    assert largest_array(jax.grad(total, argnums=(0, 1, 2)), *case[:3]) <= heads * whole // 8
    assert largest_array(lambda *arrays: naive(*arrays, case[3]), *case[:3]) >= heads * whole


WRONG_SHAPES = {
    1: ((2, 20, 2, 8), "keys is (2, 20, 2, 8), expected (2, 21, 2, 8)"),
    2: ((2, 21, 1, 8), "values is (2, 21, 1, 8), expected (2, 21, 2, 8)"),
    3: ((2, 20), "segment_ids is (2, 20), expected (2, 21)"),
    0: ((2, 21, 5, 8), "5 query heads, expected a multiple of 2 kv heads"),
}


@pytest.mark.parametrize("argument", WRONG_SHAPES)
def test_wrong_shapes_are_named(argument):
    case = list(make_case(make_segments(*[LAYOUTS["one document"]] * 2)))
    shape, message = WRONG_SHAPES[argument]
    case[argument] = jnp.zeros(shape, case[argument].dtype)
    said = failure(causal_attention, *case, kind=ValueError, scale=SCALE)
    assert said == f"causal_attention: {message}"


def test_each_head_has_a_sink():
    case = make_case(make_segments(LAYOUTS["one document"]))
    with pytest.raises(ValueError, match=r"causal_attention: sinks is \(2,\), expected \(4,\)"):
        causal_attention(*case, jnp.zeros(2), scale=SCALE)


# --- the TPU kernels, in interpret mode -----------------------------------------------------------


@pytest.mark.parametrize("window", [None, 20])
def test_the_kernels_compute_the_same(window, monkeypatch):
    monkeypatch.setattr(causal_attention_tpu, "BLOCKS", (128,))
    segments = make_segments([(1, 100), (2, 28), (3, 100), (0, 28)])
    case = make_case(segments, group=2, kv_heads=1, width=128)
    real = (segments != 0)[..., None, None]

    def run(implementation):
        def summed(*arrays):
            view = {"scale": SCALE, "window": window}
            attended = causal_attention(*arrays, case[3], **view, implementation=implementation)
            return jnp.sum(jnp.where(real, attended, 0) ** 2), attended

        gradients, attended = jax.jit(jax.grad(summed, argnums=(0, 1, 2), has_aux=True))(*case[:3])
        return [*gradients, np.where(real, attended, 0)]

    for kernels, reference in zip(run("interpret"), run("reference"), strict=True):
        np.testing.assert_allclose(kernels, reference, atol=1e-5 * np.abs(reference).max())


@pytest.mark.parametrize(
    ("length", "width", "message"),
    [(256, 64, "width divisible by 128, not 64"), (100, 128, "rows divisible by 128, not 100")],
)
def test_what_the_kernels_do_not_cover_is_named(length, width, message):
    case = make_case(make_segments([(1, length)]), width=width)
    with pytest.raises(ValueError, match=message):
        causal_attention(*case, scale=SCALE, implementation="pallas")


def test_the_kernels_have_no_sinks():
    case = make_case(make_segments([(1, 128)]), width=128)
    with pytest.raises(ValueError, match="the TPU kernels have no attention sinks"):
        causal_attention(*case, jnp.zeros(4), scale=SCALE, implementation="pallas")
