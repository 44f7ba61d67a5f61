"""Tests of Muse Glimmer's config.json, and of what its drafters are given."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.models import family_architecture, make_architecture, make_sharding, random_module

from dflash import errors
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import DFlashConfig, DFlashShape, LayerView
from dflash.models.config import FULL, SLIDING, MuseGlimmerArchitecture
from dflash.models.muse_glimmer import MuseGlimmer

SIZES = {"num_hidden_layers": 6, "layer_types": (), "layer_rope_theta": ()}


def test_every_fourth_layer_from_the_last_is_full_and_not_rotated():
    arch = family_architecture("muse_glimmer_text", **SIZES, rope_theta=5e5)
    assert arch.layer_types == (SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL)
    assert arch.layer_rope_theta == (5e5, 0, 5e5, 5e5, 5e5, 0)


def test_placeholders_are_read_beside_the_language_model():
    arch = family_architecture("muse_glimmer", image_token_id=5, video_token_id=6)
    config = MuseGlimmer.config_to_hf(arch)
    del config["text_config"]["image_token_id"], config["text_config"]["video_token_id"]
    assert MuseGlimmer.architecture_from_hf(config) == arch


def test_drafters_get_raw_rows_and_scaled_logits():
    arch = family_architecture("muse_glimmer", image_token_id=5, output_multiplier=0.5)
    model = random_module(MuseGlimmer, arch)
    tokens = jnp.array([[0, 5, 7]])
    rows = np.asarray(model.table_rows(tokens))
    np.testing.assert_array_equal(rows, np.asarray(model.embed_tokens.embedding[...])[tokens])
    embedded = np.asarray(model.embed(tokens))
    np.testing.assert_array_equal(embedded[0, 1], embedded[0, 0])
    np.testing.assert_allclose((embedded**2).mean(-1), 1, atol=1e-3)
    shape = DFlashShape.for_target(arch, None)
    heads = shape.input_embedding_scale, shape.output_multiplier, shape.final_logit_softcapping
    assert heads == (1.0, 0.5, 20.0) == arch.lent


PLAIN = {"hidden_size": 6656, "num_hidden_layers": 52, "vocab_size": 201_819}
PUBLISHED = MuseGlimmerArchitecture(
    vocab_size=202_048, hidden_size=6656, intermediate_size=19_968, num_hidden_layers=52,
    num_attention_heads=32, num_key_value_heads=2, head_dim=128, max_position_embeddings=131_072,
)  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 9, "output_multiplier": 2.0}])
def test_metas_drafter_leaves_the_rest_to_its_class_and_the_target(fields):
    """Its rows see keys up to the window away, so one more than those of z-lab's drafters."""
    config = {"architectures": ["MuseGlimmerAssistantModel"], **fields}
    config["model_type"] = "muse_glimmer_assistant"
    build = {"dtype": jnp.float32, "sharding": make_sharding()}
    shape = DFlash.create(DFlashConfig(), config, PUBLISHED, **build).shape
    expected = fields.get("sliding_window", 2048) + 1
    assert shape.views == (LayerView(expected, causal=False),) * 5
    assert (shape.block_size, shape.mask_token_id) == (16, 201_818)
    assert shape.target_layer_ids == (1, 13, 25, 37, 49)
    assert shape.decoder.rope_theta == 5e5
    assert shape.output_multiplier == fields.get("output_multiplier", 26**-0.5)
    assert shape.final_logit_softcapping == 20.0
    plain = DFlash.create(DFlashConfig(), config, make_architecture(**PLAIN), **build).shape
    assert plain.final_logit_softcapping == 0  # None.


# Fields of the class that belong to training or to the tokenizer.
INERT = {"attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"}
OTHER = {int: 6, float: 3.0, str: "other", list: [0], dict: {"rope_type": "other"}}


def test_each_field_of_metas_drafter_is_that_of_transformers_and_read_or_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.MuseGlimmerAssistantConfig().to_dict()
    names = config.keys() - transformers.PreTrainedConfig().to_dict().keys() - INERT
    config = {name: config[name] for name in names}
    kind = {"model_type": "muse_glimmer_assistant"}
    whole = DFlashShape.from_hf(config | kind)
    assert DFlashShape.from_hf(kind) == whole
    for name in names:
        rest = {key: value for key, value in config.items() if key != name}
        assert DFlashShape.from_hf(rest | kind) == whole, name
        try:
            changed = DFlashShape.from_hf(config | {name: OTHER[type(config[name])]} | kind)
        except errors.CheckpointError as error:
            changed = str(error)
        assert changed != whole, name
