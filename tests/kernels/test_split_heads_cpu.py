import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.kernels.split_heads import Part, split_heads
from dflash.runs import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels.find_compiler() is None, reason="needs a C++ compiler")

JOINED = (Part(3), Part(), Part(rotated=False, normed=False))


def make_case(parts=JOINED, width=32, rotated=32, shares=1, dtype=jnp.float32):
    """Returns rows, cos and sin of random angles, and a scale for each part with a norm."""
    rng = np.random.default_rng(0)

    def draw(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    rows = draw(3, 5, shares * width * sum(part.share for part in parts))
    angles = draw(1, 5, 1, rotated // 2, dtype=jnp.float32)
    scales = [draw(width) for part in parts if part.normed]
    return rows, (jnp.cos(angles), jnp.sin(angles)), scales


@pytest.mark.parametrize(
    ("parts", "width", "rotated", "normed"),
    [
        (JOINED, 64, 64, True),
        (JOINED, 24, 16, False),
        ((Part(2),), 40, 40, True),
        ((Part(), Part(rotated=False)), 80, 40, True),
        ((Part(rotated=False, normed=False),), 16, 16, False),
    ],
)
def test_it_is_the_reference(parts, width, rotated, normed):
    *case, scales = make_case(parts, width, rotated, shares=2)
    case.append(scales if normed else ())
    form = functools.partial(split_heads, parts=parts, width=width, eps=1e-5)
    compiled = jax.jit(form, static_argnames="implementation")
    assert "dflash_split_heads" in compiled.lower(*case, implementation="cpu").as_text()
    found = compiled(*case, implementation="cpu")
    for one, other in zip(found, compiled(*case, implementation="reference"), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=0, atol=4e-6)


def test_bfloat16_is_rounded_once():
    case = make_case(dtype=jnp.bfloat16)
    form = functools.partial(split_heads, parts=JOINED, eps=1e-5)
    found = jax.jit(lambda: form(*case, implementation="cpu"))()
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), case)
    wide = form(*wide, implementation="reference")
    for one, other in zip(found, wide, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=2**-8, atol=1e-5)


def test_gradients_are_those_of_the_reference():
    rows, turned, scales = make_case()

    def loss(rows, scales, implementation):
        heads = split_heads(rows, turned, scales, parts=JOINED, implementation=implementation)
        return sum(jnp.sin(part).sum() for part in heads)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    found, expected = (gradients(rows, scales, name) for name in ("cpu", "reference"))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected
    )
