"""Top-k and top-p by bits keep what a sort of the vocabulary keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import make_sharding

from dflash.inference.logits import top_k_top_p

VOCAB = 23
# Powers of two sum without rounding, so a nucleus has one right answer; few values, so many tie.
exponents = st.lists(st.integers(-6, 2), min_size=VOCAB, max_size=VOCAB)
wanted_k = st.integers(0, VOCAB + 2)
wanted_p = st.sampled_from([0.0, 1 / 16, 0.25, 0.5, 0.75, 15 / 16, 1.0])


@jax.jit
def by_sort(logits, top_k, top_p):
    """The same by sorting, as it was once done: the reference."""
    rank = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    negated, order = jax.lax.sort((-logits, rank), num_keys=1, is_stable=True)
    top_k, top_p = top_k[:, None, None], top_p[:, None, None]
    likely = (rank < top_k) | (top_k <= 0)
    weights = jnp.where(likely, jnp.exp(-negated - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    before = jnp.cumsum(weights, axis=-1) - weights
    goal = top_p * weights.sum(axis=-1, keepdims=True)
    stays = likely & ((before < goal) | (top_p >= 1) | (rank == 0))
    last = stays.sum(axis=-1, keepdims=True) - 1
    value = -jnp.take_along_axis(negated, last, axis=-1)
    token = jnp.take_along_axis(order, last, axis=-1)
    stays = (logits > value) | ((logits == value) & (rank <= token))
    return jnp.where(stays, logits, -jnp.inf)


by_bits = jax.jit(top_k_top_p.top_k_top_p)
search = jax.jit(top_k_top_p._search, static_argnums=(3, 4))


def arrays(top_k, top_p):
    return jnp.array(top_k, jnp.int32), jnp.array(top_p, jnp.float32)


@settings(max_examples=100)
@given(
    st.lists(exponents, min_size=4, max_size=4),
    st.tuples(wanted_k, wanted_k),
    st.tuples(wanted_p, wanted_p),
)
def test_what_stays_is_what_a_sort_leaves(rows, top_k, top_p):
    logits = np.log(2.0 ** np.array(rows, np.float32).reshape(2, 2, VOCAB))
    # The mass of a tied row is exact in powers of two only, so its largest weight must be one.
    logits -= logits.max(axis=-1, keepdims=True)
    limits = arrays(top_k, top_p)
    np.testing.assert_array_equal(by_bits(logits, *limits), by_sort(logits, *limits))


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), wanted_k)
def test_any_floats_are_ranked(seed, top_k):
    """Of both signs and every size, zeros of both signs, and masked tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 2**32, (2, 2, VOCAB), np.uint32).view(np.float32)
    special = rng.choice(np.float32([0.0, -0.0, -np.inf, 1.0]), logits.shape)
    logits = np.where((rng.random(logits.shape) < 0.5) | ~np.isfinite(logits), special, logits)
    limits = arrays((top_k, 3), (1.0, 1.0))
    np.testing.assert_array_equal(by_bits(logits, *limits), by_sort(logits, *limits))


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8),
    st.integers(1, 10),
    st.sampled_from([7, 32]),
    st.sampled_from([1, 2, 4]),
)
def test_any_number_of_bits_per_step_finds_the_same_key(keys, rank, bits, step_bits):
    """The key of a rank, or 0 if there are not so many; CPUs and accelerators differ in bits."""
    keys = sorted((key % 2**bits for key in keys), reverse=True)
    arguments = jnp.array(keys, jnp.uint32), jnp.ones(len(keys)), jnp.full(1, rank, jnp.float32)
    assert search(*arguments, bits, step_bits).tolist() == [[*keys, 0, 0][rank - 1]]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_large_vocabulary(top_p):
    logits = 4 * jax.random.normal(jax.random.key(3), (2, 3, 50_000))
    limits = arrays((0, 700), (top_p, top_p))
    found, wanted = (np.isfinite(f(logits, *limits)).sum(-1) for f in (by_bits, by_sort))
    # Sums of many float32 differ in their last digits by their order.
    np.testing.assert_allclose(found, wanted, atol=2)


def test_a_split_vocabulary_stays_split():
    eight = make_sharding(data=2, tensor=4)
    place = eight.named((2, 3, 64), ("batch", None, "vocab"))
    logits = jax.random.normal(jax.random.key(0), (2, 3, 64)).round(1)
    limits = arrays((7, 0), (0.9, 0.5))
    split = jax.jit(top_k_top_p.top_k_top_p, out_shardings=place)
    placed = jax.device_put(logits, place)
    np.testing.assert_array_equal(split(placed, *limits), by_bits(logits, *limits))
    program = split.lower(placed, *limits).compile().as_text()
    assert "all-reduce" in program
    for name in ("all-gather", "all-to-all", "collective-permute", "sort(", "scatter"):
        assert name not in program, name
