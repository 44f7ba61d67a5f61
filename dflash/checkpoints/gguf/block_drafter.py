"""Conversion between the metadata of a drafter's GGUF file and the fields of config.json.

llama.cpp has one architecture, "dflash", for DFlash, DFlash2 and DSpark; the tensors tell which. A
file names the inputs of layers: input n is the output of layer n - 1.

Source: llama.cpp, src/models/dflash.cpp and the converters under conversion/.
"""

from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.checkpoints.gguf import architecture, families, file_header
from dflash.checkpoints.gguf.file_header import GgufHeader

DRAFT_IDS = "d2t"  # Tensor with the target token of each draft token.
# Codes of tokens that can be drafted, [V, r]; rows of tokens that cannot are zeros.
DRAFT_CODES = "selector_successor.weight"
DFLASH, DFLASH2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel"
HF_CLASSES = DFLASH, DFLASH2, DSPARK

_PREFIX = architecture.DRAFTER + "."
_MASK, _TOKENS = "tokenizer.ggml.mask_token_id", "tokenizer.ggml.tokens"
_BLOCK_SIZE, _TAPS = _PREFIX + "block_size", _PREFIX + "target_layers"
_CAUSAL, _VALUE_SCALE = _PREFIX + "attention.causal", _PREFIX + "attention.value_scale"
_WINDOW = _PREFIX + "attention.sliding_window"
_PATTERN = _WINDOW + "_pattern"
_ROTATED = _PREFIX + "rope.dimension_count"
_SECTIONS = _PREFIX + "rope.dimension_sections"  # Of positions in images; texts need none.
_FROM_ANCHOR, _CONFIDENCE = _PREFIX + "sample_from_anchor", _PREFIX + "has_confidence_head"
_DFLASH2_FIELDS = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
_KEYS = {
    *(_BLOCK_SIZE, _TAPS, _CAUSAL, _VALUE_SCALE, _WINDOW, _PATTERN, _SECTIONS, _FROM_ANCHOR),
    *(_CONFIDENCE, *(_PREFIX + name for name in _DFLASH2_FIELDS)),
}
_GROUP = "dflash_config"
# Fields that llama.cpp lacks.
_UNKNOWN = (
    *("target_hidden_size", "mask_embedding"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the contents of a config.json for the drafter in a file."""
    architecture.check_known(header, _PREFIX, {key.removeprefix(_PREFIX) for key in _KEYS})
    decoder = architecture.decoder_of(header, _PREFIX)
    causal = header.get(_CAUSAL, bool, False)
    config = decoder | {
        "model_type": "qwen3",
        "vocab_size": len(header.require(_TOKENS, list)),
        "rope_scaling": architecture.stated_scaling(header, _PREFIX),
        "block_size": header.require(_BLOCK_SIZE, int),
        **_windows(header, decoder["num_hidden_layers"]),
        "partial_rotary_factor": families.rotated_part(
            header.get(_ROTATED, int, decoder["head_dim"]), decoder["head_dim"]
        ),
        "attention_sink_bias": "blk.0.attn_sinks.weight" in header.tensors,
        "attention_value_scale": header.get(_VALUE_SCALE, float, 1.0),
    }
    block = {"mask_token_id": header.require(_MASK, int), "target_layer_ids": _tapped(header)}
    if "markov_w1.weight" in header.tensors:
        return config | block | {"is_causal": causal} | _dspark_fields(header)
    if header.get(_FROM_ANCHOR, bool, False):
        raise errors.CheckpointError(f"{header.file}: {_FROM_ANCHOR}: only of DSpark drafters")
    block["causal"] = causal
    if DRAFT_IDS in header.tensors:
        config["draft_vocab_size"] = header.tensors[DRAFT_IDS].shape[0]
    if "selector_hidden.weight" in header.tensors:
        fields = {name: header.require(_PREFIX + name, int) for name in _DFLASH2_FIELDS}
        return config | {"architectures": [DFLASH2], _GROUP: block | fields}
    return config | {"architectures": [DFLASH], _GROUP: block}


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a drafter, given its config.json as `config_to_hf` writes it."""
    hf_class = config["architectures"][0]
    for name in (*_UNKNOWN, "draft_vocab_size") if hf_class == DSPARK else _UNKNOWN:
        hf_config.check_only(config, name, None)
    block = config.get(_GROUP, config)
    rotated = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    values = architecture.decoder_metadata(config, _PREFIX) | {
        architecture.ARCHITECTURE: architecture.DRAFTER,
        _BLOCK_SIZE: config["block_size"],
        _TAPS: [layer + 1 for layer in block["target_layer_ids"]],
        _CAUSAL: _causality(config),
        _ROTATED: rotated,
        _MASK: block["mask_token_id"],
    }
    if "attention_value_scale" in config:
        values[_VALUE_SCALE] = float(config["attention_value_scale"])
    if _SLIDING in config["layer_types"]:
        values[_WINDOW] = config["sliding_window"]
        values[_PATTERN] = [kind == _SLIDING for kind in config["layer_types"]]
    if hf_class == DFLASH2:
        values |= {_PREFIX + name: block[name] for name in _DFLASH2_FIELDS}
    if hf_class == DSPARK:
        hf_config.check_only(config, "markov_head_type", "vanilla")
        if config["enable_confidence_head"]:
            hf_config.check_only(config, "confidence_head_with_markov", True)
        values |= {_FROM_ANCHOR: True, _CONFIDENCE: config["enable_confidence_head"]}
    return values


def _tapped(header: GgufHeader) -> list[int]:
    """Returns the target layers whose outputs are the features."""
    taps = header.require(_TAPS, list)
    if not taps or any(type(tap) is not int or tap < 1 for tap in taps):
        raise file_header.unsupported(header.file, f"{_TAPS} is {taps!s:.40}")
    return [tap - 1 for tap in taps]


def _windows(header: GgufHeader, num_layers: int) -> dict[str, Any]:
    window = header.get(_WINDOW, int, 0)
    if not window:
        return {"layer_types": [_FULL] * num_layers, "sliding_window": None}
    pattern = header.require(_PATTERN, list)
    if len(pattern) != num_layers or any(type(slides) is not bool for slides in pattern):
        raise file_header.unsupported(header.file, f"{_PATTERN} is not one boolean for each layer")
    types = [_SLIDING if slides else _FULL for slides in pattern]
    return {"layer_types": types, "sliding_window": window}


def _dspark_fields(header: GgufHeader) -> dict[str, Any]:
    if not header.get(_FROM_ANCHOR, bool, False):
        raise errors.CheckpointError(
            f"{header.file}: {_FROM_ANCHOR}: only true is supported for DSpark drafters"
        )
    confident = "conf_proj.weight" in header.tensors
    return {
        "architectures": [DSPARK],
        "markov_rank": header.tensors["markov_w1.weight"].shape[-1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident,
    }


def _causality(config: Mapping[str, Any]) -> bool:
    """Returns whether blocks are causal; llama.cpp has one answer for all layers."""
    causal_field = config.get(_GROUP, {}).get("causal", config.get("is_causal"))
    sliding = causal_field if causal_field is not None else not config["sliding_window_non_causal"]
    by_type = {_FULL: bool(causal_field), _SLIDING: sliding}
    causal = {by_type[kind] for kind in config["layer_types"]}
    if len(causal) > 1:
        raise errors.CheckpointError(
            "config.json: layer_types: causal and bidirectional layers in one drafter cannot be "
            "written as a GGUF file"
        )
    return causal.pop()
