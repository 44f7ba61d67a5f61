import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.kernels import quantized
from dflash.kernels.quantized import Quantized

KV_DTYPES = ["int8", "float8_e4m3fn"]


def encode(rows, kv_dtype):
    return quantized.encode(jnp.asarray(rows), Quantized(jnp.zeros(0, kv_dtype), jnp.zeros(0)))


def decode(rows):
    return np.asarray(rows.values, np.float64) * np.asarray(rows.scales.mT, np.float64)


def test_int8_by_hand():
    rows = encode([[[12.7, -0.24, 0.26], [0.0, 0.0, 0.0], [0.5, -1.0, 0.0]]], "int8")
    np.testing.assert_array_equal(rows.values, [[[127, -2, 3], [0, 0, 0], [64, -127, 0]]])
    np.testing.assert_allclose(rows.scales, [[[0.1, 1.0, 1 / 127]]], rtol=1e-6)
    assert rows.shape == (1, 3, 3)
    assert (rows.dtype, rows.scales.dtype) == (jnp.int8, jnp.float32)


@pytest.mark.parametrize(("kv_dtype", "step"), [("int8", 1 / 127), ("float8_e4m3fn", 1 / 8)])
def test_numbers_are_off_by_half_a_step(kv_dtype, step):
    """The step depends on the row's largest number in int8, and on the number itself in float8."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.integers(-4, 5, (3, 40, 1))
    rows = (sizes * rng.normal(size=(3, 40, 64))).astype(np.float32)
    error = np.abs(decode(encode(rows, kv_dtype)) - rows)
    peak = np.abs(rows).max(axis=-1, keepdims=True)
    # Steps are constant below the smallest normal number, 2⁻⁶ (scaled by 1 / 448).
    of = peak if kv_dtype == "int8" else np.maximum(np.abs(rows), peak * 2**-6 / 448)
    assert (error <= 1.0001 * step / 2 * of).all()
    assert (error > 0.4 * step / 2 * of).any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_s_bits_depend_on_nothing_but_the_row(kv_dtype):
    rows = np.random.default_rng(1).normal(size=(2, 17, 64)).astype(np.float32)
    run = jax.jit(lambda rows: encode(rows, kv_dtype))
    together = run(rows)
    for i in (0, 9, 16):
        alone = run(rows[:, i : i + 1])
        bits = (np.asarray(x.values).view(np.uint8) for x in (alone, together))
        one, all_rows = bits
        np.testing.assert_array_equal(one[:, 0], all_rows[:, i])
        np.testing.assert_array_equal(alone.scales[..., 0], together.scales[..., i])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_values_fit_bfloat16_exactly(kv_dtype):
    rows = np.random.default_rng(2).normal(size=(50, 64)).astype(np.float32)
    stored = encode(rows, kv_dtype)
    values, scales = quantized.split(stored, jnp.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(values, np.float32), np.asarray(stored.values, np.float32)
    )
    assert scales is stored.scales


def test_plain_rows_are_cast_and_nothing_else():
    rows = jnp.array([[1.0, 2.5]])
    stored = quantized.encode(rows, jnp.zeros(0, jnp.bfloat16))
    assert stored.dtype == jnp.bfloat16
    values, scales = quantized.split(stored, jnp.float32)
    assert values is stored
    assert scales is None
    assert quantized.scaled(rows, None) is rows


def test_a_dtype_without_a_largest_number_is_refused():
    with pytest.raises(ValueError, match="must be int8 or float8_e4m3fn, not int4"):
        encode([[1.0]], "int4")
