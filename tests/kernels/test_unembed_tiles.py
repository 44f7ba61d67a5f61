import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import make_sharding

from dflash.kernels import unembed_tiles
from dflash.kernels.unembed_tiles import Noise

BOUND = 3.0


def bounded(products):
    return BOUND * jnp.tanh(products / BOUND)


def plain(products):
    return products


@functools.partial(jax.jit, static_argnames=("transposed", "finish", "mesh", "tile", "form"))
def pick(hidden, head, noise, *, transposed, finish=plain, mesh=(), tile=128, form="tiles"):
    return unembed_tiles.unembed_argmax(
        hidden,
        head,
        noise,
        transposed=transposed,
        finish=finish,
        batch="batch",
        sharding=make_sharding(*mesh),
        implementation=form,
        largest_tile=tile,
    )


def check(hidden, head, noise, **how):
    forms = unembed_tiles.IMPLEMENTATIONS
    found, expected = (pick(hidden, head, noise, form=form, **how) for form in forms)
    assert found[0].dtype == jnp.int32
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    return found


def make_noise(batch: int, rows: int) -> Noise:
    """Noise of every other sequence; the rest is greedy."""
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), (batch, rows)))
    temperature = jnp.where(jnp.arange(batch) % 2, 0.8, 0.0)[:, None]
    return Noise(keys, jnp.broadcast_to(temperature, (batch, rows)))


def make_case(batch, rows, columns, dtype, transposed, seed=0):
    """Small integers, whose products are exact and often equal."""
    rng = np.random.default_rng(seed)
    head = rng.integers(-1, 2, (columns, 5) if transposed else (5, columns))
    return jnp.asarray(rng.integers(-2, 3, (batch, rows, 5)), dtype), jnp.asarray(head, dtype)


@settings(max_examples=8)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([3, 127, 128, 300]),
    st.sampled_from([7, 128, 200]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.booleans(),
    st.booleans(),
)
def test_tiles_find_what_the_reference_does(batch, rows, columns, tile, dtype, transposed, samples):
    hidden, head = make_case(batch, rows, columns, dtype, transposed, seed=columns)
    noise = make_noise(batch, rows) if samples else None
    check(hidden, head, noise, transposed=transposed, tile=tile, finish=bounded)


@pytest.mark.parametrize("mesh", [(), (2, 1, 4)])
@pytest.mark.parametrize("samples", [False, True])
def test_nonfinite_logits(samples, mesh):
    logits = np.zeros((5, 520), np.float32)
    logits[0, [130, 400]], logits[0, [140, 500]] = np.nan, np.inf
    logits[1, [260, 390]] = np.inf
    logits[2] = -np.inf
    logits[3, [259, 510]] = 7
    hidden, noise = jnp.ones((2, 1, 1)), make_noise(2, 1) if samples else None
    for row, token in enumerate([130, 260, 0, 259, 0]):
        head = jnp.asarray(logits[row : row + 1])
        tokens, finite = check(hidden, head, noise, transposed=False, mesh=mesh)
        assert tokens[0, 0] == token
        assert finite.tolist() == [[row >= 3]] * 2


@pytest.mark.parametrize("mesh", [(1, 1, 8), (2, 1, 4), (8, 1, 1)])
@pytest.mark.parametrize("samples", [False, True])
def test_sharded(mesh, samples):
    for transposed in (False, True):
        hidden, head = make_case(8, 2, 8 * 150, jnp.float32, transposed)
        noise = make_noise(8, 2) if samples else None
        check(hidden, head, noise, transposed=transposed, mesh=mesh)


@pytest.mark.parametrize("size", [1, 127, 1000])
def test_noise_is_that_of_jax(size):
    keys = jax.random.split(jax.random.key(size), 40)
    expected = jax.jit(jax.vmap(lambda key: jax.random.gumbel(key, (size,))))(keys)
    noise_of = jax.jit(unembed_tiles.gumbel)
    for start in {0, size // 3, size - 1}:
        found = noise_of(jax.random.key_data(keys), jnp.arange(start, size))
        np.testing.assert_array_equal(found, expected[:, start:])


def test_unknown_implementation():
    with pytest.raises(ValueError, match="'fast' is not one of"):
        pick(*make_case(1, 1, 8, jnp.float32, False), None, transposed=False, form="fast")


def test_cpus_compute_all_logits():
    assert not unembed_tiles.pays(1 << 20, 1 << 20, "batch", make_sharding())
