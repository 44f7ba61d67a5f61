import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.golden import import_transformers
from support.models import make_architecture

from dflash.config.schema import RopeScaling
from dflash.kernels.split_heads import rotate
from dflash.layers import rotary

LLAMA31 = RopeScaling(8.0, 1.0, 4.0, 8192)
LLAMA32 = RopeScaling(32.0, 1.0, 4.0, 8192)
YARN = RopeScaling(factor=4.0, original_max_position_embeddings=32768, rope_type="yarn")
YARNS = {
    "qwen3's": YARN,
    "kimi's, whose amplitudes cancel": dataclasses.replace(
        YARN, factor=64.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    "mscale that does not cancel": dataclasses.replace(YARN, mscale=0.7, mscale_all_dim=1.0),
    "mscale alone, which is ignored": dataclasses.replace(YARN, mscale=0.7),
    "stated amplitude": dataclasses.replace(
        YARN, mscale=1.0, mscale_all_dim=1.0, attention_factor=1.4159
    ),
    "not rounded": dataclasses.replace(YARN, truncate=False),
    "another blend": dataclasses.replace(YARN, beta_fast=20.0, beta_slow=2.0),
    "short context": dataclasses.replace(YARN, original_max_position_embeddings=8),
    "factor 1": dataclasses.replace(YARN, factor=1.0),
}
SCALINGS = {"none": None, "llama 3.1's": LLAMA31, "llama 3.2's": LLAMA32} | YARNS


def hf_config(scaling):
    _, transformers = import_transformers()
    rope = {"rope_type": "default", "rope_theta": 5e5}
    if scaling is not None:
        rope |= {name: value for name, value in vars(scaling).items() if value is not None}
    sizes = {"head_dim": 64, "max_position_embeddings": 131072}
    return transformers.LlamaConfig(**sizes, rope_parameters=rope)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_amplitude_are_transformers(name):
    scaling = SCALINGS[name]
    config = hf_config(scaling)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(config)
    expected = theirs.inv_freq.numpy()
    np.testing.assert_allclose(rotary.frequencies(64, 5e5, scaling), expected, rtol=2e-6)
    np.testing.assert_allclose(rotary.amplitude(scaling), theirs.attention_scaling, rtol=1e-6)


def test_rotation_turns_pairs_in_the_complex_plane():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 3, 2, 8))
    positions = jnp.array([[0, 5, 11]])
    freqs = 1e4 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
        1j * np.asarray(positions)[..., None, None] * freqs
    )
    arch = make_architecture(head_dim=8, rope_theta=1e4)
    rotated = rotate(jnp.asarray(x, jnp.float32), rotary.angles(positions, arch))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotated, expected, atol=1e-5)


def test_bfloat16_is_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 1, 64)), jnp.bfloat16)
    cos_sin = rotary.angles(jnp.array([[4093]]), make_architecture(head_dim=64))
    rotated = rotate(x, cos_sin)
    assert rotated.dtype == jnp.bfloat16
    wide = rotate(x.astype(jnp.float32), cos_sin)
    np.testing.assert_array_equal(rotated, wide.astype(jnp.bfloat16))
