"""Tests of splitting a projection into normalized and rotated heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense import assert_close
from support.interpreter import interpret

from dflash.kernels.split_heads import Part, rms_norm, rotate, split_heads

EPS = 1e-2  # Large enough to affect results.
HEADS = (Part(),)
VALUES = Part(rotated=False, normed=False)
QUERIES_KEYS_VALUES = (Part(4), Part(), VALUES)


def make_case(length, heads, width, dtype, *, parts=HEADS, scaled=True):
    """Returns rows, cos and sin of random angles, and a scale for each rotated part."""
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 7, size=(2, length, 1, width // 2))
    rows = jnp.asarray(rng.normal(size=(2, length, heads * width)).astype(dtype))
    cos_sin = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    scales = [rng.uniform(0.5, 2, width) for part in parts if part.normed]
    return rows, cos_sin, tuple(jnp.asarray(scale, dtype) for scale in scales if scaled)


def expected(rows, cos_sin, scales, parts=HEADS):
    """Computes the outputs in float64, by products of complex numbers."""
    width = 2 * cos_sin[0].shape[-1]
    heads = np.asarray(rows, np.float64).reshape(*rows.shape[:2], -1, width)
    ends = np.cumsum([part.share for part in parts]) * heads.shape[2] // sum(p.share for p in parts)
    cos, sin = (np.asarray(each, np.float64) for each in cos_sin)
    found = np.split(heads, ends[:-1], axis=2)
    scales = iter(scales)
    for i, form in enumerate(parts):
        scale = next(scales, None) if form.normed else None
        if scale is not None:
            found[i] = found[i] / np.sqrt(np.mean(found[i] ** 2, axis=-1, keepdims=True) + EPS)
            found[i] = found[i] * np.asarray(scale, np.float64)
        if form.rotated:
            halves = found[i][..., : width // 2] + 1j * found[i][..., width // 2 :]
            turned = halves * (cos + 1j * sin)
            found[i] = np.concatenate([turned.real, turned.imag], axis=-1)
    return found


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
@pytest.mark.parametrize(
    ("length", "heads", "width", "dtype", "scaled", "parts"),
    [
        (1, 1, 128, jnp.float32, True, HEADS),
        (15, 3, 128, jnp.float32, False, HEADS),
        (16, 4, 128, jnp.bfloat16, True, HEADS),
        (256, 2, 256, jnp.float32, True, HEADS),
        (3, 3, 128, jnp.bfloat16, True, (VALUES,)),
        (15, 4, 128, jnp.bfloat16, True, (Part(), VALUES)),
        (16, 6, 128, jnp.float32, False, (Part(), Part(), VALUES)),
        (17, 12, 128, jnp.float32, True, QUERIES_KEYS_VALUES),
        (256, 6, 128, jnp.bfloat16, True, QUERIES_KEYS_VALUES),
        (16, 3, 128, jnp.float32, True, (Part(), Part(rotated=False), Part(normed=False))),
        (2, 10, 256, jnp.bfloat16, False, (Part(8), Part(), VALUES)),
    ],
)
def test_heads(implementation, length, heads, width, dtype, scaled, parts):
    case = make_case(length, heads, width, dtype, parts=parts, scaled=scaled)
    call = functools.partial(split_heads, parts=parts, eps=EPS, implementation=implementation)
    found = (interpret if implementation == "interpret" else lambda f, *x: f(*x))(call, *case)
    tolerance = 3e-2 if dtype == jnp.bfloat16 else 1e-5
    for ours, plain in zip(found, expected(*case, parts), strict=True):
        assert (ours.shape, ours.dtype) == (plain.shape, dtype)
        assert_close(ours, plain, tolerance)


@pytest.mark.parametrize("of_scales", [jnp.bfloat16, jnp.float32])
def test_bfloat16_is_rounded_where_plain_jax_rounds(of_scales):
    *case, scales = make_case(16, 6, 128, jnp.bfloat16, parts=QUERIES_KEYS_VALUES)
    case.append(tuple(scale.astype(of_scales) * 1.001 for scale in scales))
    call = functools.partial(split_heads, parts=QUERIES_KEYS_VALUES, eps=EPS)
    kernel = interpret(functools.partial(call, implementation="interpret"), *case)
    plain = call(*case, implementation="reference")
    # Sums of squares in another order may differ by one unit in the last place.
    different = [np.mean(np.asarray(a != b)) for a, b in zip(kernel, plain, strict=True)]
    assert max(different) < 0.01
    assert different[2] == 0


@pytest.mark.parametrize(
    ("length", "parts", "scaled"),
    [
        (16, QUERIES_KEYS_VALUES, True),
        (256, (Part(2),), True),
        (16, HEADS, False),
        (16, (VALUES,), True),
    ],
)
def test_gradients_are_those_of_the_reference(length, parts, scaled):
    rows, cos_sin, scales = make_case(length, 6, 128, jnp.float32, parts=parts, scaled=scaled)

    def total(rows, scales, implementation):
        options = {"parts": parts, "eps": EPS, "implementation": implementation}
        found = split_heads(rows, cos_sin, scales, **options)
        return sum(jnp.sum(jnp.sin(part)) for part in found)

    gradients = [
        jax.tree.leaves(jax.grad(total, argnums=(0, 1))(rows, scales, implementation))
        for implementation in ("interpret", "reference")
    ]
    for ours, plain in zip(*gradients, strict=True):
        assert np.abs(plain).max() > 0.1
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "width", "parts", "message"),
    [
        (16, 64, HEADS, "heads of 64"),
        (130, 128, HEADS, "130 rows, expected at most 128 or a multiple of it"),
        (16, 128, (Part(), Part(2)), "a part of 2 shares after 1, expected a multiple"),
    ],
)
def test_what_the_kernel_does_not_cover(length, width, parts, message):
    case = make_case(length, 6, width, jnp.float32, parts=parts)
    call = functools.partial(split_heads, *case, parts=parts, eps=EPS)
    with pytest.raises(ValueError, match=message):
        call(implementation="pallas")
    for ours, plain in zip(call(), expected(*case, parts), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


def test_the_beginning_of_a_head_is_rotated():
    rows, (cos, sin), (scale, *_) = make_case(4, 2, 128, jnp.float32)
    narrow = cos[..., :32], sin[..., :32]
    (whole,) = split_heads(rows, narrow, [scale], width=128, eps=EPS)
    plain = rms_norm(rows.reshape(2, 4, -1, 128), scale, EPS)
    np.testing.assert_array_equal(whole[..., 64:], plain[..., 64:])
    np.testing.assert_allclose(whole[..., :64], rotate(plain[..., :64], narrow), rtol=1e-6)
    with pytest.raises(ValueError, match="64 of 128 head dimensions are rotated, expected all"):
        split_heads(rows, narrow, [scale], width=128, eps=EPS, implementation="pallas")


def test_wrong_shapes_are_named():
    rows, cos_sin, scales = make_case(4, 2, 128, jnp.float32)
    message = r"split_heads: rows \(2, 4, 200\) and scales \[\(128,\)\]"
    with pytest.raises(ValueError, match=message):
        split_heads(rows[..., :200], cos_sin, scales)
    with pytest.raises(ValueError, match=r"scales \[\(128,\)\] do not fit 6 × n heads of 128"):
        split_heads(rows, cos_sin, scales, parts=QUERIES_KEYS_VALUES)
