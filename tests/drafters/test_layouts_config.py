"""Tests of the layouts in which others publish drafters."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors
from support import failure
from support.dflash_cases import FULL, SLIDE, WHOLE, make_shape
from support.models import (
    check_same_weights,
    family_architecture,
    make_architecture,
    make_sharding,
)

from dflash.checkpoints import checkpoint, files
from dflash.drafters import layouts_config
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash2 import DFlash2
from dflash.drafters.dflash2_config import DFlash2Shape
from dflash.drafters.dflash_config import LayerView
from dflash.drafters.dspark import DSpark
from dflash.drafters.dspark_config import DSparkConfig, DSparkShape
from dflash.drafters.lilicorr import LiLiCorr
from dflash.drafters.ubtree import UBTree
from dflash.loading import conversion, models
from dflash.parallel import parameters

DSPARK = {
    "markov_rank": 4,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}
# Strategy -> its class, and a shape whose target's depth is not stated.
BASE = make_shape(FULL, FULL, num_target_layers=None)
STRATEGIES = {
    "dflash": (DFlash, BASE),
    "dspark": (DSpark, DSparkShape(**vars(BASE) | {"sample_from_anchor": True}, **DSPARK)),
    "dflash2": (DFlash2, DFlash2Shape(**vars(BASE), **DFLASH2)),
}
# Fields beside the decoder's that files of speculators have.
OF_DRAFTER = ("block_size", "draft_vocab_size", *DSPARK, *DFLASH2)


def speculators(name, shape, **changes):
    """Returns the config.json of a shape in the layout of speculators."""
    config = STRATEGIES[name][0].config_to_hf(shape)
    group = config.pop("dflash_config", {})
    stated = config | group
    decoder = {key: value for key, value in config.items() if key not in OF_DRAFTER}
    del decoder["architectures"], decoder["sliding_window_non_causal"]
    return {
        "architectures": ["DSparkDraftModel" if name == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": name,
        "transformer_layer_config": decoder,
        "mask_token_id": shape.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.target_layer_ids],
        "draft_vocab_size": shape.draft_vocab_size or shape.decoder.vocab_size,
        **{key: stated[key] for key in OF_DRAFTER if key in stated and key != "draft_vocab_size"},
    } | changes


@pytest.mark.parametrize("name", STRATEGIES)
def test_files_of_speculators(name):
    kind, shape = STRATEGIES[name]
    assert kind.architecture_from_hf(speculators(name, shape)) == shape
    assert shape.fit(make_architecture()).num_target_layers == 3
    explicit = speculators(name, shape, sample_from_anchor=name == "dspark", projector_type=name)
    assert kind.architecture_from_hf(explicit) == shape
    other = dataclasses.replace(shape, sample_from_anchor=not shape.sample_from_anchor)
    stated = speculators(name, shape, sample_from_anchor=other.sample_from_anchor)
    assert kind.architecture_from_hf(stated) == other
    assert kind.architecture_from_hf(kind.config_to_hf(other)) == other


@pytest.mark.parametrize(
    ("name", "stated", "causal"),
    [("dflash", None, True), ("dspark", None, True), ("dflash2", None, False),
     ("dflash", True, False), ("dflash2", False, True)],
)  # fmt: skip
def test_windows_in_files_of_speculators(name, stated, causal):
    kind, shape = STRATEGIES[name]
    config = speculators(name, shape, sliding_window_non_causal=stated)
    config["transformer_layer_config"] |= {"layer_types": [SLIDE, WHOLE], "sliding_window": 5}
    expected = dataclasses.replace(shape, views=(LayerView(5, causal), FULL))
    assert kind.architecture_from_hf(config) == expected


def test_defaults_in_files_of_speculators():
    shape = make_shape(
        FULL, decoder=make_architecture(num_hidden_layers=1, vocab_size=40_000), block_size=8,
        draft_vocab_size=32_000, num_target_layers=None,
    )  # fmt: skip
    config = speculators("dflash", shape)
    del config["block_size"], config["draft_vocab_size"]
    assert DFlash.architecture_from_hf(config) == shape


@pytest.mark.parametrize("place", ["dflash_config", "dspark_config", None])
def test_dspark_fields_may_stand_in_a_group(place):
    kind, shape = STRATEGIES["dspark"]
    shape = dataclasses.replace(shape, num_target_layers=3)
    config = kind.config_to_hf(shape) | {"architectures": ["DSparkDraftModel"]}
    group = {key: config.pop(key) for key in ("mask_token_id", "target_layer_ids")}
    group |= {"attention_mode": "gqa", "projector_type": "dspark"}
    own = {key: config.pop(key) for key in DSPARK}
    config |= {"dflash_config": group}
    config |= {place: config.get(place, {}) | own} if place else own
    assert kind.architecture_from_hf(config) == shape


REFUSED = {
    "projector_type: 'domino' is not supported, only 'dflash'": {"projector_type": "domino"},
    "is_neox_style: false is not supported, only true": {"is_neox_style": False},
    "aux_hidden_state_layer_ids: expected at least one layer, got none": {
        "aux_hidden_state_layer_ids": []
    },
    "speculators_model_type: 'xpress' is not supported, only 'dflash'": {
        "speculators_model_type": "xpress"
    },
    "xpress_rank: unknown field, which may change the drafts; remove it if it does not": {
        "xpress_rank": 256
    },
    "draft_vocab_size: 49 exceeds the vocabulary of 48": {"draft_vocab_size": 49},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_files_of_speculators_may_not_say(message):
    config = speculators("dflash", BASE, **REFUSED[message])
    assert failure(DFlash.architecture_from_hf, config) == f"config.json: {message}"


@pytest.mark.parametrize(("name", "drafted"), [("dflash", None), ("dflash", 20), ("dspark", None)])
def test_weights_of_speculators(name, drafted, tmp_path):
    """The copies of the target's weights in such files are not read."""
    kind, shape = STRATEGIES[name]
    shape = dataclasses.replace(shape, num_target_layers=3, draft_vocab_size=drafted)
    build = {"dtype": jnp.float32, "sharding": make_sharding()}
    drafter = kind(shape, **build)
    parameters.init_fast_random(drafter, 0)
    directory = tmp_path / "drafter"
    checkpoint.save(drafter, directory, kind.config_to_hf(shape))
    config = speculators(name, dataclasses.replace(shape, num_target_layers=None))
    (directory / files.CONFIG).write_text(json.dumps(config))
    tensors = safetensors.load_file(directory / "model.safetensors")
    copies = {"embed_tokens.weight": (48, 32), "verifier_norm.weight": (32,)}
    if drafted is None:
        copies |= {"lm_head.weight": (48, 32), "verifier_lm_head.weight": (48, 32)}
    copies = {key: np.full(size, np.nan, np.float32) for key, size in copies.items()}
    safetensors.save_file(tensors | copies, directory / "model.safetensors")

    again = kind(kind.architecture_from_hf(checkpoint.read_config(directory)), **build)
    checkpoint.load(again, directory)
    check_same_weights(again, drafter)


OF_ZLAB = {"input_embedding_scale": 6.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_factors_of_the_embedding_and_of_the_logits(name, is_grouped):
    kind, shape = STRATEGIES[name]
    config = kind.config_to_hf(shape)
    place = config.setdefault("dflash_config", {}) if is_grouped else config
    place |= OF_ZLAB
    expected = dataclasses.replace(shape, **OF_ZLAB)
    assert kind.architecture_from_hf(config) == expected
    assert kind.architecture_from_hf(kind.config_to_hf(expected)) == expected


@pytest.mark.parametrize("kind", [UBTree, LiLiCorr])
def test_strategies_whose_anchor_does_not_draft(kind):
    config = kind.config_to_hf(kind.architecture_for(make_architecture(vocab_size=600), None))
    assert failure(kind.architecture_from_hf, config | {"sample_from_anchor": True}) == (
        "config.json: sample_from_anchor: true is not supported, only false"
    )


def test_rotary_embeddings_of_speculators():
    """The sections of a multimodal target's positions are equal for text, so they do not matter."""
    config = speculators("dspark", STRATEGIES["dspark"][1])
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [4, 2, 2]}
    decoder = config["transformer_layer_config"] | {"rope_parameters": rope}
    shape = DSpark.architecture_from_hf(config | {"transformer_layer_config": decoder})
    assert (shape.decoder.rope_theta, shape.partial_rotary_factor) == (1e7, 1.0)
    decoder["rope_parameters"] = rope | {"partial_rotary_factor": 0.5}
    shape = DSpark.architecture_from_hf(config | {"transformer_layer_config": decoder})
    assert shape.partial_rotary_factor == 0.5


@pytest.mark.parametrize("layout", ["flat", "grouped", "speculators"])
def test_the_rank_is_that_of_the_tensors(layout, tmp_path):
    kind, shape = STRATEGIES["dspark"]
    shape = dataclasses.replace(shape, num_target_layers=3)
    build = {"dtype": jnp.float32, "sharding": make_sharding()}
    drafter, directory = kind(shape, **build), tmp_path / "drafter"
    parameters.init_fast_random(drafter, 0)
    config = kind.config_to_hf(shape) | {"markov_rank": 8}
    if layout == "grouped":
        config["dflash_config"] = {"markov_rank": config.pop("markov_rank")}
    elif layout == "speculators":
        config = speculators("dspark", shape, markov_rank=8)
    checkpoint.save(drafter, directory, config)
    source = models.find_drafter(DSparkConfig(checkpoint=str(directory)))
    described = models.described(kind, source)
    assert kind.architecture_from_hf(described).markov_rank == shape.markov_rank
    models.load_weights(kind(kind.architecture_from_hf(described), **build), source)
    assert conversion.build_abstract(directory, "float32")[1].shape.markov_rank == 4


UNREAD = {
    "dflash_config: token_shift: unknown field, which may change the drafts; remove it if it does "
    "not": {"token_shift": 1},
    "shift_label: true is not supported, only false": {"shift_label": True},
    "logit_scale: 0.5 is not supported, only 1.0": {"logit_scale": 0.5},
    "dflash_config: output_multiplier: expected a number >= 0 or null, got 'x'": {
        "output_multiplier": "x"
    },
}


@pytest.mark.parametrize("message", UNREAD)
def test_fields_of_the_group_that_are_not_read_are_refused(message):
    config = DFlash.config_to_hf(BASE)
    config["dflash_config"] |= UNREAD[message] | {"training_block_size": 16}
    assert failure(DFlash.architecture_from_hf, config) == f"config.json: {message}"


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"block_size": 8}, 4.0),
        ({"block_size": 8, "dflash_config": {"mask_token_id": 3}}, 4.0),
        ({"block_size": 8, "dflash_config": {"input_embedding_scale": 2.0}}, 2.0),
        ({"dflash_config": {"block_size": 8}}, None),
        ({"block_size": 8, "dflash_config": {"projector_type": "dflash2"}}, None),
        ({"block_size": 8, "speculators_model_type": "dflash"}, None),
    ],
)
def test_files_before_z_labs_package_leave_the_factor_on_embeddings(config, scale):
    """Their reference embeds by the target's own module, that of Gemma with its factor."""
    target = family_architecture("gemma3", hidden_size=16)
    completed = layouts_config.with_heads(config, target)
    assert completed.get("dflash_config", {}).get("input_embedding_scale") == scale
