import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.kernels.split_heads import Part, split_heads
from dflash.runs import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels.find_compiler() is None, reason="needs a C++ compiler")

JOINED = (Part(3), Part(), Part(rotated=False, normed=False))


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
    rng = np.random.default_rng(0)
    columns = 2 * width * sum(part.share for part in parts)
    rows = jnp.asarray(rng.normal(size=(3, 5, columns)).astype(jnp.float32))
    angles = jnp.asarray(rng.normal(size=(1, 5, 1, rotated // 2)).astype(jnp.float32))
    scales = [
        jnp.asarray(rng.normal(size=width).astype(jnp.float32)) for part in parts if part.normed
    ]
    form = functools.partial(split_heads, parts=parts, width=width, eps=1e-5)
    compiled = jax.jit(form, static_argnames="implementation")
    case = rows, (jnp.cos(angles), jnp.sin(angles)), scales if normed else ()
    assert "dflash_split_heads" in compiled.lower(*case, implementation="cpu").as_text()
    found = compiled(*case, implementation="cpu")
    for one, other in zip(found, compiled(*case, implementation="reference"), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=0, atol=4e-6)


def test_bfloat16_is_rounded_once():
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(2, 3, 5 * 32)), jnp.bfloat16)
    angles = jnp.asarray(rng.normal(size=(2, 3, 1, 16)).astype(jnp.float32))
    scales = [jnp.asarray(rng.normal(size=32), jnp.bfloat16)] * 2
    form = functools.partial(split_heads, cos_sin=(jnp.cos(angles), jnp.sin(angles)), parts=JOINED)
    found = jax.jit(lambda: form(rows, scales=scales, eps=1e-5, implementation="cpu"))()
    wide = form(rows.astype(jnp.float32), scales=[one.astype(jnp.float32) for one in scales],
                eps=1e-5, implementation="reference")  # fmt: skip
    for one, other in zip(found, wide, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=2**-8, atol=1e-5)


def test_gradients_are_those_of_the_reference():
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(2, 3, 5 * 32)).astype(jnp.float32))
    angles = jnp.asarray(rng.normal(size=(2, 3, 1, 16)).astype(jnp.float32))
    scales = [jnp.asarray(rng.normal(size=32).astype(jnp.float32))] * 2

    def loss(rows, scales, implementation):
        turned = jnp.cos(angles), jnp.sin(angles)
        heads = split_heads(rows, turned, scales, parts=JOINED, implementation=implementation)
        return sum(jnp.sin(part).sum() for part in heads)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    found, expected = (gradients(rows, scales, name) for name in ("cpu", "reference"))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected
    )
