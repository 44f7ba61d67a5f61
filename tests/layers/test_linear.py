"""Tests of linear maps, embeddings, norms and the gated MLP."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_sharding

from dflash.layers import linear
from dflash.layers.linear import Embedding, Linear, RMSNorm, ZeroCenteredRMSNorm
from dflash.layers.mlp import Mlp
from dflash.parallel import parameters


def build(kind, *args, dtype=jnp.float32):
    """Returns a module with random weights, including those of norms."""
    module = kind(*args, dtype=dtype, sharding=make_sharding())
    rng = np.random.default_rng(0)
    values = {
        path: jnp.asarray(rng.normal(size=param.get_value().shape).astype(dtype))
        for path, param in parameters.named_parameters(module)
    }
    parameters.assign(module, values)
    return module


def draw(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(9), shape).astype(dtype)


def wide(*arrays):
    return tuple(np.asarray(array, np.float64) for array in arrays)


def test_biases_are_added_before_and_after_joining():
    apart = [build(functools.partial(Linear, bias=True), 5, n, (None, None)) for n in (3, 4)]
    x = draw(2, 5)
    expected = [wide(x)[0] @ np.asarray(m.kernel[...]) + np.asarray(m.bias[...]) for m in apart]
    np.testing.assert_allclose(linear.join(apart)(x), np.hstack(expected), rtol=1e-5, atol=1e-5)
    assert not linear.can_join([apart[0], build(Linear, 5, 3, (None, None))])
    for module, rows in zip(apart, expected, strict=True):
        np.testing.assert_allclose(module(x), rows, rtol=1e-5, atol=1e-5)


def test_linear_of_bfloat16_rounds_once():
    module = build(Linear, 64, 3, (None, None), dtype=jnp.bfloat16)
    x = draw(2, 64, dtype=jnp.bfloat16)
    kernel, inputs = wide(module.kernel[...], x)
    result = jax.jit(module)(x)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(*wide(result), inputs @ kernel, rtol=2**-8, atol=1e-5)


def test_embedding_and_its_head():
    module = build(Embedding, 7, 4)
    tokens = jnp.array([[6, 0], [3, 3]])
    (table,) = wide(module.embedding[...])
    np.testing.assert_allclose(module(tokens), table[np.asarray(tokens)])
    hidden = draw(2, 2, 4)
    logits = wide(hidden)[0] @ table.T
    np.testing.assert_allclose(module.attend(hidden), logits, rtol=1e-5, atol=1e-5)


def test_logits_of_bfloat16_are_float32():
    module = build(Embedding, 64, 32, dtype=jnp.bfloat16)
    hidden = draw(1, 3, 32, dtype=jnp.bfloat16)
    logits = module.attend(hidden)
    assert logits.dtype == jnp.float32
    inputs, table = wide(hidden, module.embedding[...])
    # The error is far below that of bfloat16, so no intermediate result was rounded.
    np.testing.assert_allclose(logits, inputs @ table.T, rtol=1e-5, atol=1e-5)


def test_a_zero_centered_norm_rounds_once():
    """As transformers does: the scale is small, and 1 + scale has no place in bfloat16."""
    module = build(ZeroCenteredRMSNorm, 64, 1e-6, dtype=jnp.bfloat16)
    module.scale.set_value(module.scale[...] * 2.0**-7)
    x = draw(3, 64, dtype=jnp.bfloat16)
    inputs, scale = wide(x, module.scale[...])
    expected = (1 + scale) * inputs / np.sqrt((inputs**2).mean(-1, keepdims=True))
    assert module(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(*wide(module(x)), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps):
    module = build(RMSNorm, 6, eps)
    x = draw(2, 3, 6)
    inputs, scale = wide(x, module.scale[...])
    expected = scale * inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + eps)
    np.testing.assert_allclose(module(x), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    module = build(RMSNorm, 512, 1e-6, dtype=jnp.bfloat16)
    x = 100 * draw(4, 512, dtype=jnp.bfloat16)
    inputs, scale = wide(x, module.scale[...])
    expected = scale * inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + 1e-6)
    normed = module(x)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(*wide(normed), expected, rtol=2**-7)  # Two roundings.


def test_mlp():
    module = build(Mlp, 5, 7)
    x = draw(2, 3, 5)
    inputs, gate, up, down = wide(
        x, *(getattr(module, f"{name}_proj").kernel[...] for name in ("gate", "up", "down"))
    )
    gated = inputs @ gate
    expected = (gated / (1 + np.exp(-gated)) * (inputs @ up)) @ down
    np.testing.assert_allclose(module(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "linear head", "embedding head"])
def test_gradients_of_products(kind, dtype):
    table = kind == "embedding head"
    arguments = (Embedding, 7, 5) if table else (Linear, 5, 7, (None, None))
    x, slopes = draw(2, 3, 5, dtype=dtype), draw(2, 3, 7)
    ((path, param),) = parameters.named_parameters(build(*arguments, dtype=dtype))
    weights = param.get_value()

    def total(x, weights):
        module = build(*arguments, dtype=dtype)
        parameters.assign(module, {path: weights})
        outputs = module(x) if kind == "linear" else module.attend(x)
        return jnp.sum(outputs.astype(jnp.float32) * slopes)

    ours = jax.jit(jax.grad(total, argnums=(0, 1)))(x, weights)
    x, weights, slopes = wide(x, weights, slopes)
    by_x = slopes @ (weights if table else weights.T)
    by_weights = np.einsum("btd,btf->df", x, slopes)
    expected = by_x, by_weights.T if table else by_weights
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-6
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(mine, np.float64), theirs, rtol=0, atol=tolerance * np.abs(theirs).max()
        )
