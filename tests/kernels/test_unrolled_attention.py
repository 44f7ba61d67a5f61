"""Tests of attention over unrolled steps, against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense import dense_attention

from dflash.kernels.unrolled_attention import unrolled_attention

SCALE = 0.3
SEGMENTS = np.array([[1] * 9 + [2] * 7 + [0] * 5, [1] + [2] + [3] * 19], np.int32)


def make_case(later, *, group=2, kv_heads=2):
    rng = np.random.default_rng(0)
    batch, length = SEGMENTS.shape

    def draw(*shape):
        return jnp.asarray(rng.normal(size=(batch, length, *shape, 8)).astype(jnp.float32))

    return (
        draw(group * kv_heads), draw(later, kv_heads), draw(later, kv_heads),
        draw(kv_heads), draw(kv_heads), jnp.asarray(SEGMENTS),
    )  # fmt: skip


def expected(*case):
    """Computes the outputs row by row; padding rows are zero."""
    queries, keys, values, first_keys, first_values, segments = map(np.asarray, case)
    outputs = np.zeros(queries.shape)
    for b, row in enumerate(segments):
        for t in np.flatnonzero(row):
            seen = np.array([s for s in range(t + 1) if row[s] == row[t]])
            outputs[b, t] = dense_attention(
                queries[b, t : t + 1],
                np.concatenate([first_keys[b, seen], keys[b, t]]),
                np.concatenate([first_values[b, seen], values[b, t]]),
                np.ones((1, len(seen) + keys.shape[2]), bool),
                SCALE,
            )[0]
    return outputs


@pytest.mark.parametrize(
    ("later", "group", "kv_heads", "chunk"), [(1, 2, 2, 8), (3, 3, 1, 21), (6, 1, 2, 5)]
)
def test_rows_see_the_first_step_and_their_own_place(later, group, kv_heads, chunk):
    case = make_case(later, group=group, kv_heads=kv_heads)
    run = jax.jit(functools.partial(unrolled_attention, scale=SCALE, chunk_tokens=chunk))
    wanted, real = expected(*case), SEGMENTS != 0
    np.testing.assert_allclose(np.asarray(run(*case))[real], wanted[real], rtol=1e-5, atol=1e-5)
    assert np.isfinite(run(*case)).all()


def test_gradients_are_those_of_one_softmax():
    case = make_case(2)
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    causal = jnp.asarray(same & np.tri(SEGMENTS.shape[1], dtype=bool))

    def dense(queries, keys, values, first_keys, first_values, _):
        queries = queries.reshape(*queries.shape[:2], 2, -1, queries.shape[-1])
        first = jnp.einsum("btkgh,bskh->bkgts", queries, first_keys)
        first = jnp.where(causal[:, None, None], first, -jnp.inf)
        own = jnp.einsum("btkgh,btjkh->bkgtj", queries, keys)
        weights = jax.nn.softmax(SCALE * jnp.concatenate([first, own], axis=-1))
        length = first.shape[-1]
        out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :length], first_values)
        out += jnp.einsum("bkgtj,btjkh->btkgh", weights[..., length:], values)
        return out.reshape(*out.shape[:2], -1, out.shape[-1])

    def loss(attend, *arrays):
        return jnp.sum(jnp.sin(attend(*arrays, case[-1])) * (SEGMENTS != 0)[..., None, None])

    run = functools.partial(unrolled_attention, scale=SCALE, chunk_tokens=8)
    with jax.default_matmul_precision("highest"):
        mine, wanted = (
            jax.jit(jax.grad(functools.partial(loss, attend), argnums=range(5)))(*case[:5])
            for attend in (run, dense)
        )
    for one, other in zip(mine, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", range(1, 6))
def test_shapes_that_do_not_fit_are_named(which):
    names = ("queries", "keys", "values", "first_keys", "first_values", "segment_ids")
    case = list(make_case(2))
    case[which] = case[which][:, :-1]
    with pytest.raises(ValueError, match=f"{names[which]} is "):
        unrolled_attention(*case, scale=SCALE)
