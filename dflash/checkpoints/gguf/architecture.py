"""Conversion between the metadata of a target's GGUF file and the fields of config.json.

A prefix is the architecture of the file and a dot, as in "llama.block_count". Keys and rules:
llama.cpp, gguf-py/gguf/constants.py and the converters under conversion/.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.checkpoints.gguf import families, file_header
from dflash.checkpoints.gguf.families import FAMILIES, Family
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.storage.files import view

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

ARCHITECTURE = "general.architecture"
DRAFTER = "dflash"  # Architecture of block drafters; see block_drafter.py.
_DEFAULT_THETA = 10_000.0
# Llama 3's scaling of rotary frequencies is stored as divisors of the frequencies only.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MAX_DEVIATION = 1e-4  # Relative; divisors are stored in float32.

_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
_ELSEWHERE = {  # Keys that are read one by one below, or describe what other keys state.
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", _EPSILON),
    *("vocab_size", "tensor_data_layout", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    "rope.scaling.finetuned",
}
_ROTATED = "rope.dimension_count"
_SCALING, _UNSCALED, _LLAMA3_NAME = "rope.scaling.", "none", "llama3"
_YARN = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
_SCALED = {"yarn": _YARN, "linear": {"factor": "factor"}}
_SCALING_TYPES = {"factor": float, "original_max_position_embeddings": int}
_NEUTRAL = {
    **{"expert_count": 0, "expert_used_count": 0, "rope.scale_linear": 1.0},
    **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
}


def family_of(header: GgufHeader) -> Family:
    """Returns the family of a file."""
    name = header.require(ARCHITECTURE, str)
    if name not in FAMILIES:
        raise errors.CheckpointError(
            f"{header.file}: architecture {name!r} is not supported, only "
            f"{', '.join((*FAMILIES, DRAFTER))}"
        )
    return FAMILIES[name]


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the contents of a config.json for the model in a file."""
    family = family_of(header)
    prefix = header.metadata[ARCHITECTURE] + "."
    check_known(header, prefix, {*family.fields, *family.own_keys})
    config = decoder_of(header, prefix)
    if _ROTATED not in family.own_keys:
        _check_size(header, prefix + _ROTATED, config["head_dim"])
    for key, name in family.fields.items():
        config[name] = header.require(prefix + key, int)
    if ROPE_FACTORS in header.tensors:
        config["rope_scaling"] = _llama3_scaling(header, config)
    else:
        config["rope_scaling"] = stated_scaling(header, prefix)
    family_fields = family.own(header, prefix, config)
    return {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        **config,
        "vocab_size": _num_rows(header),
        "tie_word_embeddings": HEAD not in header.tensors,
        **family.implied,
        **family_fields,
    }


def decoder_of(header: GgufHeader, prefix: str) -> dict[str, Any]:
    """Returns the fields of config.json that targets and drafters share, but rotary scaling."""
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
    }
    for key, name in _INTEGERS.items():
        # Models without dense layers may state the width of their experts only.
        by_experts = prefix + f"expert_{key}"
        is_stated = prefix + key in header.metadata or by_experts not in header.metadata
        config[name] = header.require(prefix + key if is_stated else by_experts, int)
    config["rms_norm_eps"] = families.shortest(header.require(prefix + _EPSILON, float))
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = header.get(prefix + "attention.head_count_kv", int, heads)
    config["head_dim"] = _head_dim(header, prefix, config["hidden_size"], heads)
    config["rope_theta"] = _theta(header, prefix + "rope.freq_base")
    return config


def written_family(config: Mapping[str, Any]) -> tuple[str, Family]:
    """Returns the architecture in llama.cpp and the family of a model to be written."""
    hf_class = config["architectures"][0]
    written = {name: family for name, family in FAMILIES.items() if family.is_written}
    known = {family.hf_class: (name, family) for name, family in written.items()}
    if hf_class not in known:
        raise errors.CheckpointError(
            f"config.json: architectures: {hf_class} cannot be written as a GGUF file, only "
            f"{', '.join(known)} and block drafters"
        )
    return known[hf_class]


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a target, given its config.json as `config_to_hf` writes it."""
    name, family = written_family(config)
    for field, implied in family.implied.items():
        hf_config.check_only(config, field, implied)
    prefix = name + "."
    return {
        ARCHITECTURE: name,
        **decoder_metadata(config, prefix),
        **{prefix + key: config[field] for key, field in family.fields.items()},
        prefix + "rope.dimension_count": config["head_dim"],
        prefix + "vocab_size": config["vocab_size"],
    }


def decoder_metadata(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the metadata that targets and drafters share; see `metadata_of`."""
    values = {prefix + key: config[field] for key, field in _INTEGERS.items()} | {
        prefix + _EPSILON: float(config["rms_norm_eps"]),
        prefix + "attention.head_count_kv": config["num_key_value_heads"],
        prefix + "attention.key_length": config["head_dim"],
        prefix + "attention.value_length": config["head_dim"],
        prefix + "rope.freq_base": float(config["rope_theta"]),
    }
    scaling = config["rope_scaling"]
    if scaling is None or scaling["rope_type"] == _LLAMA3_NAME:
        return values
    for field in scaling.keys() - {"rope_type", *_YARN.values()}:
        raise errors.CheckpointError(
            f"config.json: rope_scaling: {field} cannot be written to a GGUF file"
        )
    return values | {
        f"{prefix}{_SCALING}type": scaling["rope_type"],
        **{
            f"{prefix}{_SCALING}{key}": scaling[field]
            for key, field in _SCALED[scaling["rope_type"]].items()
        },
    }


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the divisors of rotary frequencies of Llama 3's scaling; None without it."""
    scaling = config["rope_scaling"]
    if scaling is None or scaling["rope_type"] != _LLAMA3_NAME:
        return None
    return np.array(_divisors(config, scaling), np.float32)


def check_known(header: GgufHeader, prefix: str, family_keys: Collection[str]) -> None:
    """Checks that options in the file are common ones, or `family_keys` without the prefix."""
    known = {*_INTEGERS, *family_keys, *_ELSEWHERE}
    options = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    unknown = [
        f"{prefix}{key}={value!s:.40}"
        for key, value in options.items()
        if key not in known and value != _NEUTRAL.get(key)
    ]
    if unknown:
        raise errors.CheckpointError(
            f"{header.file}: options of the model that are not supported: {', '.join(unknown)}"
        )


def _theta(header: GgufHeader, key: str) -> float:
    theta = header.get(key, float, _DEFAULT_THETA)
    if theta < 1:
        raise file_header.unsupported(header.file, f"{key} is {theta}")
    return families.shortest(theta)


def _head_dim(header: GgufHeader, prefix: str, width: int, heads: int) -> int:
    if heads < 1:
        raise file_header.unsupported(header.file, f"{prefix}attention.head_count is {heads}")
    size = header.get(prefix + "attention.key_length", int, width // heads)
    if size < 1:
        raise file_header.unsupported(header.file, f"{prefix}attention.key_length is {size}")
    _check_size(header, prefix + "attention.value_length", size)
    return size


def _check_size(header: GgufHeader, key: str, size: int) -> None:
    value = header.get(key, int, size)
    if value != size:
        raise errors.CheckpointError(
            f"{header.file}: {key}: {value} is not supported with heads of {size}"
        )


def _num_rows(header: GgufHeader) -> int:
    if EMBEDDING not in header.tensors:
        raise errors.CheckpointError(f"{header.file}: the tensor {EMBEDDING!r} is missing")
    return header.tensors[EMBEDDING].shape[0]


def stated_scaling(header: GgufHeader, prefix: str) -> dict[str, Any] | None:
    """Returns `rope_scaling` of config.json that the metadata state; None without scaling."""
    kind = header.get(f"{prefix}{_SCALING}type", str, _UNSCALED)
    if kind == _UNSCALED:
        return None
    if kind not in _SCALED:
        raise errors.CheckpointError(
            f"{header.file}: {prefix}{_SCALING}type: {kind!r} is not supported, only "
            f"{' and '.join(map(repr, _SCALED))}"
        )
    fields = {
        field: header.require(f"{prefix}{_SCALING}{key}", _SCALING_TYPES[field])
        for key, field in _SCALED[kind].items()
    }
    return {"rope_type": kind, **fields}


def _llama3_scaling(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling of Llama 3 whose divisors the file stores."""
    entry = header.tensors[ROPE_FACTORS]
    if entry.kind != "F32" or entry.shape != (config["head_dim"] // 2,):
        problem = f"tensor {ROPE_FACTORS!r} is {entry.kind} of shape {list(entry.shape)}"
        raise file_header.unsupported(header.file, problem)
    stored = view(entry.file, entry.begin, entry.end).view("<f4")
    scaling = {"rope_type": _LLAMA3_NAME, "factor": float(stored.max()), **_LLAMA3}
    if not np.allclose(stored, _divisors(config, scaling), rtol=_MAX_DEVIATION, atol=0):
        raise errors.CheckpointError(
            f"{header.file}: tensor {ROPE_FACTORS!r}: only the rotary scaling of Llama 3.1 and 3.2 "
            "is supported"
        )
    return scaling


def _divisors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> list[float]:
    return [
        _divisor(2 * math.pi * config["rope_theta"] ** (2 * i / config["head_dim"]), scaling)
        for i in range(config["head_dim"] // 2)
    ]


def _divisor(wavelength: float, scaling: Mapping[str, Any]) -> float:
    """Returns the divisor of the frequency with a wavelength in tokens.

    Source: transformers, modeling_rope_utils.py, `_compute_llama3_parameters`.
    """
    periods = scaling["original_max_position_embeddings"] / wavelength
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = min(max((periods - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)
