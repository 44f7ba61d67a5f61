"""Tests of Gemma's config.json, and of what its drafters are given."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from support.models import family_architecture, random_module

from dflash.models.gemma3 import Gemma3Text
from dflash.models.gemma4 import Gemma4


def test_drafters_read_scaled_embeddings_and_bounded_logits():
    """The embedding and the output head that drafters are given are those of the target."""
    arch = family_architecture("gemma4", final_logit_softcapping=2.0, tie_word_embeddings=False)
    model = random_module(Gemma4, arch)
    tokens = jnp.arange(6).reshape(2, 3)
    scale = np.float32(arch.hidden_size**0.5)
    table = np.asarray(model.embed_tokens.embedding[...])
    np.testing.assert_allclose(model.embed(tokens), scale * table[tokens], rtol=1e-6)
    hidden = np.random.default_rng(0).normal(size=(2, 3, arch.hidden_size)).astype(np.float32)
    logits = hidden @ np.asarray(model.lm_head.kernel[...])
    np.testing.assert_allclose(model.unembed(hidden), 2 * np.tanh(logits / 2), atol=1e-5)


def test_older_files_state_the_interval_of_full_layers():
    arch = dataclasses.replace(family_architecture("gemma3"), layer_types=())
    config = Gemma3Text.config_to_hf(arch) | {"sliding_window_pattern": 3}
    expected = ("sliding_attention", "sliding_attention", "full_attention")
    assert Gemma3Text.architecture_from_hf(config).layer_types == expected
