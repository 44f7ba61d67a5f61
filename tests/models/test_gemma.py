"""Tests of Gemma's checkpoints: the language model within a multimodal one, and bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import failure
from support.models import family_architecture, make_sharding

from dflash import errors
from dflash.models.config import SLIDING
from dflash.models.gemma3 import Gemma3Text
from dflash.models.gemma4 import Gemma4, Gemma4Text
from dflash.parallel import parameters

BAD = {
    "hidden_size_per_layer_input: 256 is not supported, only 0": {
        "hidden_size_per_layer_input": 256
    },
    "num_kv_shared_layers: 4 is not supported, only 0": {"num_kv_shared_layers": 4},
    "use_bidirectional_attention: 'all' is not supported, only null or 'vision'": {
        "use_bidirectional_attention": "all"
    },
    "layer_types: the last layer is 'sliding_attention', expected 'full_attention'": {
        "layer_types": [SLIDING] * 3
    },
    "layer_types: names 2 layers, but num_hidden_layers is 3": {
        "layer_types": ["sliding_attention", "full_attention"]
    },
    "num_global_key_value_heads: num_attention_heads=4 does not divide into 3 groups": {
        "num_global_key_value_heads": 3
    },
    "sliding_window: missing, but layer_types[0] is 'sliding_attention'": {"sliding_window": None},
    "hidden_activation: 'silu' is not supported, only 'gelu_pytorch_tanh'": {
        "hidden_activation": "silu"
    },
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_field_is_named(message):
    config = Gemma4Text.config_to_hf(family_architecture("gemma4_text")) | BAD[message]
    assert failure(Gemma4Text.architecture_from_hf, config) == f"config.json: {message}"
    with pytest.raises(errors.CheckpointError, match=r"^config\.json: missing text_config$"):
        Gemma4.architecture_from_hf(config)


def test_drafters_read_scaled_embeddings_and_bounded_logits():
    """The embedding and the output head that drafters are given are those of the target."""
    arch = family_architecture("gemma4", final_logit_softcapping=2.0, tie_word_embeddings=False)
    model = Gemma4(arch, dtype=jnp.float32, sharding=make_sharding())
    parameters.initialize(model, jax.random.key(0))
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
