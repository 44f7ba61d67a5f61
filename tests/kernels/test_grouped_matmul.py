"""Tests of grouped products: both implementations against a loop over the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.kernels.grouped_matmul import grouped_matmul

TILES = jax.jit(lambda *arrays: grouped_matmul(*arrays, implementation="tiles"))
# Shapes compile anew: few of them, filled in many ways.
SHAPES = ((1, 1), (5, 3), (24, 4), (70, 2))


def by_loop(rows, weights, sizes):
    out, begin = np.zeros((len(rows), weights.shape[2]), np.float32), 0
    for matrix, size in zip(weights, sizes, strict=True):
        out[begin : begin + size] = rows[begin : begin + size] @ matrix
        begin += size
    return out


def draw(rng, count, groups, total):
    sizes = rng.multinomial(total, rng.dirichlet(np.full(groups, 0.5))).astype(np.int32)
    rows = rng.normal(size=(count, 6)).astype(np.float32)
    return rows, rng.normal(size=(groups, 6, 10)).astype(np.float32), sizes


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(SHAPES), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_tiles_are_the_products_of_each_group(shape, filled, seed):
    count, groups = shape
    arrays = draw(np.random.default_rng(seed), count, groups, round(filled * count))
    np.testing.assert_allclose(TILES(*arrays), by_loop(*arrays), atol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "ragged_dot"])
def test_other_implementations_agree(implementation):
    arrays = draw(np.random.default_rng(1), 24, 4, 19)
    product = grouped_matmul(*map(jnp.asarray, arrays), implementation=implementation)
    np.testing.assert_allclose(product, by_loop(*arrays), atol=1e-5)


def test_a_row_does_not_depend_on_those_beside_it():
    rng = np.random.default_rng(2)
    rows, weights, _ = draw(rng, 70, 2, 70)
    alone = TILES(rows, weights, np.array([1, 69], np.int32))[0]
    for size in (2, 33, 70):
        others = rng.normal(size=rows.shape).astype(np.float32)
        others[0] = rows[0]
        together = TILES(others, weights, np.array([size, 70 - size], np.int32))[0]
        np.testing.assert_array_equal(together, alone)


def test_gradients_are_those_of_the_loop():
    *factors, sizes = map(jnp.asarray, draw(np.random.default_rng(3), 24, 4, 19))

    def loss(implementation):
        def of(rows, weights):
            product = grouped_matmul(rows, weights, sizes, implementation=implementation)
            return jnp.sin(product).sum()

        return jax.grad(of, argnums=(0, 1))(*factors)

    for tiles, ragged in zip(loss("tiles"), loss("ragged_dot"), strict=True):
        np.testing.assert_allclose(tiles, ragged, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 6), (2, 5, 3), (2,)), r"rows \(4, 6\) do not fit weights \(2, 5, 3\)"),
        (((4, 6), (2, 6, 3), (3,)), r"sizes \(3,\) of 2 groups"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(*(jnp.zeros(shape) for shape in shapes))


def test_an_unknown_implementation():
    with pytest.raises(ValueError, match="'pallas' is none of"):
        grouped_matmul(
            jnp.zeros((1, 2)), jnp.zeros((1, 2, 2)), jnp.ones(1), implementation="pallas"
        )
