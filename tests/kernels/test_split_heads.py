"""Tests of splitting a projection into normed and rotated heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret

from dflash.kernels.split_heads import split_heads

EPS = 1e-2  # large enough to be seen


def make_case(length, heads, width, dtype, *, scaled=True, batch=2):
    """Rows, the cosines and sines of any angles, and a scale."""
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 7, size=(batch, length, 1, width // 2))
    rows = jnp.asarray(rng.normal(size=(batch, length, heads * width)), dtype)
    cos_sin = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    return rows, cos_sin, jnp.asarray(rng.uniform(0.5, 2, width), dtype) if scaled else None


def expected(rows, cos_sin, scale):
    """In float64, as a product of complex numbers."""
    width = 2 * cos_sin[0].shape[-1]
    heads = np.asarray(rows, np.float64).reshape(*rows.shape[:2], -1, width)
    if scale is not None:
        heads = heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + EPS)
        heads = heads * np.asarray(scale, np.float64)
    cos, sin = (np.asarray(each, np.float64) for each in cos_sin)
    turned = (heads[..., : width // 2] + 1j * heads[..., width // 2 :]) * (cos + 1j * sin)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
@pytest.mark.parametrize(
    ("length", "heads", "width", "dtype", "scaled"),
    [
        (1, 1, 128, jnp.float32, True),
        (15, 3, 128, jnp.float32, False),
        (16, 4, 128, jnp.bfloat16, True),
        (256, 2, 256, jnp.float32, True),
    ],
)
def test_heads(implementation, length, heads, width, dtype, scaled):
    case = make_case(length, heads, width, dtype, scaled=scaled)
    call = functools.partial(split_heads, eps=EPS, implementation=implementation)
    found = (interpret if implementation == "interpret" else lambda f, *x: f(*x))(call, *case)
    assert (found.shape, found.dtype) == ((2, length, heads, width), dtype)
    tolerance = 3e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected(*case), rtol=tolerance, atol=tolerance
    )


def test_bfloat16_is_rounded_where_plain_jax_rounds():
    case = make_case(16, 4, 128, jnp.bfloat16)
    call = functools.partial(split_heads, eps=EPS)
    kernel = interpret(functools.partial(call, implementation="interpret"), *case)
    plain = call(*case, implementation="reference")
    # One unit in the last place where sums of squares were added up in another order.
    different = np.mean(np.asarray(kernel != plain))
    assert different < 0.01


def test_gradients_are_those_of_the_reference():
    rows, cos_sin, scale = make_case(16, 2, 128, jnp.float32)

    def total(rows, scale, implementation):
        found = split_heads(rows, cos_sin, scale, eps=EPS, implementation=implementation)
        return jnp.sum(jnp.sin(found))

    gradients = jax.grad(total, argnums=(0, 1))
    for ours, plain in zip(
        gradients(rows, scale, "interpret"), gradients(rows, scale, "reference"), strict=True
    ):
        assert np.abs(plain).max() > 0.1
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "width", "message"),
    [(16, 64, "heads of 64"), (130, 128, "130 rows are no multiple of 128")],
)
def test_what_the_kernel_does_not_cover(length, width, message):
    case = make_case(length, 2, width, jnp.float32)
    with pytest.raises(ValueError, match=message):
        split_heads(*case, eps=EPS, implementation="pallas")
    np.testing.assert_allclose(split_heads(*case, eps=EPS), expected(*case), rtol=1e-4, atol=1e-4)


def test_wrong_shapes_are_named():
    rows, cos_sin, scale = make_case(4, 2, 128, jnp.float32)
    with pytest.raises(ValueError, match=r"split_heads: rows \(2, 4, 200\), scale \(128,\)"):
        split_heads(rows[..., :200], cos_sin, scale)
