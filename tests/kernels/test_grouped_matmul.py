"""Tests of grouped products: every implementation against a loop over the groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interpreter import interpret

from dflash.kernels import grouped_matmul_tpu, quantized
from dflash.kernels.grouped_matmul import grouped_matmul

TILES = jax.jit(lambda *arrays: grouped_matmul(*arrays, implementation="tiles"))
# Each shape is compiled, so there are few shapes with many different values.
SHAPES = ((1, 1), (5, 3), (24, 4), (70, 2))


def by_loop(rows, weights, sizes):
    out, begin = np.zeros((len(rows), weights.shape[2]), np.float32), 0
    for matrix, size in zip(weights, sizes, strict=True):
        out[begin : begin + size] = rows[begin : begin + size] @ matrix
        begin += size
    return out


def draw(rng, count, groups, total, depth=6, width=10):
    sizes = rng.multinomial(total, rng.dirichlet(np.full(groups, 0.5))).astype(np.int32)
    rows = rng.normal(size=(count, depth)).astype(np.float32)
    return rows, rng.normal(size=(groups, depth, width)).astype(np.float32), sizes


@settings(max_examples=60)
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


def on_tpu(*arrays, **options):
    """Runs the kernel in interpret mode."""
    call = functools.partial(grouped_matmul, implementation="interpret", **options)
    return interpret(lambda arrays: call(*arrays), tuple(map(jnp.asarray, arrays)))


@pytest.mark.parametrize(
    ("count", "groups", "total", "width"), [(24, 4, 19, 384), (5, 8, 5, 128), (40, 2, 0, 60)]
)
@pytest.mark.parametrize("few", [True, False])
def test_the_kernel_is_the_product_of_each_group(monkeypatch, few, count, groups, total, width):
    monkeypatch.setattr(grouped_matmul_tpu, "GROUPED_ROWS", 512 if few else 0)
    arrays = draw(np.random.default_rng(count), count, groups, total, 128, width)
    np.testing.assert_allclose(on_tpu(*arrays), by_loop(*arrays), atol=1e-4)


@pytest.mark.parametrize("few", [True, False])
def test_widths_that_are_no_multiple_of_the_lanes(monkeypatch, few):
    """As in gpt-oss, whose rows have 2880 elements: the last step has fewer columns."""
    monkeypatch.setattr(grouped_matmul_tpu, "GROUPED_ROWS", 512 if few else 0)
    monkeypatch.setattr(grouped_matmul_tpu, "GROUPED_WEIGHTS", 96 * 200)
    assert grouped_matmul_tpu.columns_per_step(96, 328) == 128
    rows, weights, _ = draw(np.random.default_rng(6), 16, 3, 12, 96, 328)
    arrays = rows, weights, np.array([3, 0, 9], np.int32)
    np.testing.assert_allclose(on_tpu(*arrays), by_loop(*arrays), atol=1e-4)


@pytest.mark.parametrize("block", [None, (32, 1), (64, 128)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_the_kernel_widens_eight_bits_as_it_reads_them(block, dtype):
    rng = np.random.default_rng(5)
    sizes = np.array([3, 0, 9], np.int32)
    rows = rng.normal(size=(16, 128)).astype(np.float32)
    weights, scales = quantized.quantize_array(jnp.asarray(rng.normal(size=(3, 128, 256))), dtype)
    if block is not None:
        parts = (3, 128 // block[0], 256 // block[1])
        scales = jnp.asarray(rng.uniform(0.5, 2, size=parts).astype(jnp.float32))
    spread = quantized.spread(scales, weights.shape, block)
    wide = np.asarray(weights.astype(jnp.float32) * spread)
    found = on_tpu(rows, weights, sizes, scales, block=block)
    expected = by_loop(rows, wide, sizes)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("implementation", "shape", "sizes"),
    [("interpret", (8, 2, 128, 128), [5, 2]), ("tiles", (24, 4, 6, 10), [7, 0, 9, 3])],
)
def test_gradients_are_those_of_another_implementation(implementation, shape, sizes):
    count, groups, depth, width = shape
    rows, weights, _ = draw(np.random.default_rng(3), count, groups, count, depth, width)

    def gradients(implementation):
        def of(rows, weights):
            options = {"implementation": implementation}
            return jnp.sin(grouped_matmul(rows, weights, jnp.asarray(sizes), **options)).sum()

        return jax.jit(jax.grad(of, argnums=(0, 1)))(rows, weights)

    for ours, ragged in zip(gradients(implementation), gradients("ragged_dot"), strict=True):
        np.testing.assert_allclose(ours, ragged, atol=1e-3 if depth == 128 else 1e-5)


@pytest.mark.parametrize(
    ("depth", "width", "block", "message"),
    [
        (60, 128, None, "rows of 60 elements, expected a multiple of 32"),
        (2**15, 2**15 - 1, None, "weights 32768 × 32767 are too large for VMEM"),
        (128, 128, (48, 1), "blocks of 48 inputs, expected a divisor of 128 and a multiple of 8"),
    ],
)
def test_what_the_kernel_does_not_cover(depth, width, block, message):
    arrays = ((4, depth), (2, depth, width), (2,), (2, 1, 1))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in arrays]
    call = functools.partial(grouped_matmul, block=block, implementation="pallas")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, *shapes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 6), (2, 5, 3), (2,)), r"rows \(4, 6\) do not fit weights \(2, 5, 3\)"),
        (((4, 6), (2, 6, 3), (3,)), r"sizes is \(3,\), expected \(2,\)"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(*(jnp.zeros(shape) for shape in shapes))


def test_an_unknown_implementation():
    with pytest.raises(ValueError, match="'megablox' is not one of"):
        grouped_matmul(
            jnp.zeros((1, 2)), jnp.zeros((1, 2, 2)), jnp.ones(1), implementation="megablox"
        )
