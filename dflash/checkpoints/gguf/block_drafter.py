"""Conversion between the metadata of a drafter's GGUF file and the fields of config.json.

llama.cpp has one architecture, "dflash", for DFlash, DFlash2 and DSpark; the tensors tell which. A
file names the inputs of layers: input n is the output of layer n - 1.

Source: llama.cpp, src/models/dflash.cpp and the converters under conversion/.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.checkpoints.gguf import architecture, families, file_header
from dflash.checkpoints.gguf.families import ROTATED, FamilyKeys
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.config.schema import FULL, SLIDING

DRAFT_IDS = "d2t"  # Tensor with the target token of each draft token.
# Codes of tokens that can be drafted, [V, r]; rows of tokens that cannot are zeros.
DRAFT_CODES = "selector_successor.weight"
DFLASH, DFLASH2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel"
HF_CLASSES = DFLASH, DFLASH2, DSPARK

_PREFIX, _TOKENIZER = architecture.DRAFTER + ".", "tokenizer.ggml."
_BLOCK_SIZE, _TAPS, _FROM_ANCHOR = "block_size", "target_layers", "sample_from_anchor"
_WINDOW = "attention.sliding_window"
_PATTERN = _WINDOW + "_pattern"
_CAUSAL, _VALUE_SCALE = "attention.causal", "attention.value_scale"
_CONFIDENCE = "has_confidence_head"
_DFLASH2_FIELDS = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
_GROUP = "dflash_config"
# Fields that llama.cpp lacks.
_UNKNOWN = (
    *("target_hidden_size", "mask_embedding"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keys(FamilyKeys):
    block_size: int
    target_layers: list
    is_causal: Annotated[bool, _CAUSAL] = False
    attention_value_scale: Annotated[float, _VALUE_SCALE] = 1.0
    window: Annotated[int, _WINDOW] = 0
    window_pattern: Annotated[list | None, _PATTERN] = None
    rotated_dim: Annotated[int | None, ROTATED] = None
    rope_sections: Annotated[Any, "rope.dimension_sections"] = None  # Of positions in images.
    sample_from_anchor: bool = False
    has_confidence_head: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Dflash2Keys(_Keys):
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TokenizerKeys:
    tokens: list
    mask_token_id: int


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the contents of a config.json for the drafter in a file."""
    is_dflash2 = "selector_hidden.weight" in header.tensors
    schema = _Dflash2Keys if is_dflash2 else _Keys
    decoder, keys = architecture.decoder_of(header, _PREFIX, schema)
    words = header.read(_TokenizerKeys, _TOKENIZER)
    size = decoder["head_dim"]
    rotated = size if keys.rotated_dim is None else keys.rotated_dim
    config = decoder | {
        "intermediate_size": keys.intermediate_size,
        "model_type": "qwen3",
        "vocab_size": len(words.tokens),
        "block_size": keys.block_size,
        **_windows(header.file, keys, decoder["num_hidden_layers"]),
        "partial_rotary_factor": families.rotated_part(rotated, size),
        "attention_sink_bias": "blk.0.attn_sinks.weight" in header.tensors,
        "attention_value_scale": keys.attention_value_scale,
    }
    layers = _tapped(header.file, keys.target_layers)
    block = {"mask_token_id": words.mask_token_id, "target_layer_ids": layers}
    is_dspark = "markov_w1.weight" in header.tensors
    if is_dspark != keys.sample_from_anchor:
        only = "only true is supported for" if is_dspark else "only of"
        raise errors.CheckpointError(
            f"{header.file}: {_PREFIX}{_FROM_ANCHOR}: {only} DSpark drafters"
        )
    if is_dspark:
        return config | block | {"is_causal": keys.is_causal} | _dspark_fields(header)
    block["causal"] = keys.is_causal
    if DRAFT_IDS in header.tensors:
        config["draft_vocab_size"] = header.tensors[DRAFT_IDS].shape[0]
    if is_dflash2:
        block |= {name: getattr(keys, name) for name in _DFLASH2_FIELDS}
    return config | {"architectures": [DFLASH2 if is_dflash2 else DFLASH], _GROUP: block}


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a drafter, given its config.json as `config_to_hf` writes it."""
    hf_class = config["architectures"][0]
    hf_config.check_only(config, _FROM_ANCHOR, hf_class == DSPARK)
    for name in (*_UNKNOWN, "draft_vocab_size") if hf_class == DSPARK else _UNKNOWN:
        hf_config.check_only(config, name, None)
    block = config.get(_GROUP, config)
    values = {
        _BLOCK_SIZE: config["block_size"],
        _TAPS: [layer + 1 for layer in block["target_layer_ids"]],
        _CAUSAL: _causality(config),
        ROTATED: int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)),
    }
    if "attention_value_scale" in config:
        values[_VALUE_SCALE] = float(config["attention_value_scale"])
    if SLIDING in config["layer_types"]:
        values[_WINDOW] = config["sliding_window"]
        values[_PATTERN] = [kind == SLIDING for kind in config["layer_types"]]
    if hf_class == DFLASH2:
        values |= {name: block[name] for name in _DFLASH2_FIELDS}
    if hf_class == DSPARK:
        hf_config.check_only(config, "markov_head_type", "vanilla")
        if config["enable_confidence_head"]:
            hf_config.check_only(config, "confidence_head_with_markov", True)
        values |= {_FROM_ANCHOR: True, _CONFIDENCE: config["enable_confidence_head"]}
    return {
        **architecture.decoder_metadata(config, _PREFIX),
        **{_PREFIX + name: value for name, value in values.items()},
        architecture.ARCHITECTURE: architecture.DRAFTER,
        _TOKENIZER + "mask_token_id": block["mask_token_id"],
    }


def _tapped(file: pathlib.Path, taps: list) -> list[int]:
    """Returns the target layers whose outputs are the features."""
    if not taps or any(type(tap) is not int or tap < 1 for tap in taps):
        raise file_header.unsupported(file, f"{_PREFIX}{_TAPS} is {taps!s:.40}")
    return [tap - 1 for tap in taps]


def _windows(file: pathlib.Path, keys: _Keys, num_layers: int) -> dict[str, Any]:
    if not keys.window:
        return {"layer_types": [FULL] * num_layers, "sliding_window": None}
    pattern = keys.window_pattern or []
    if len(pattern) != num_layers or any(type(slides) is not bool for slides in pattern):
        problem = f"{_PREFIX}{_PATTERN} is not one boolean for each layer"
        raise file_header.unsupported(file, problem)
    types = [SLIDING if slides else FULL for slides in pattern]
    return {"layer_types": types, "sliding_window": keys.window}


def _dspark_fields(header: GgufHeader) -> dict[str, Any]:
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
    by_type = {FULL: bool(causal_field), SLIDING: sliding}
    causal = {by_type[kind] for kind in config["layer_types"]}
    if len(causal) > 1:
        raise errors.CheckpointError(
            "config.json: layer_types: causal and bidirectional layers in one drafter cannot be "
            "written as a GGUF file"
        )
    return causal.pop()
