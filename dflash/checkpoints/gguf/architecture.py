"""Conversion between the metadata of a target's GGUF file and the fields of config.json.

A prefix is the architecture of the file and a dot, as in "llama.block_count". Keys and rules:
llama.cpp, gguf-py/gguf/constants.py and the converters under conversion/.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import numpy as np

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.checkpoints.gguf import families, file_header
from dflash.checkpoints.gguf.families import FAMILIES, ROTATED, Family, FamilyKeys
from dflash.checkpoints.gguf.file_header import GgufHeader, key_of
from dflash.storage.files import view

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

ARCHITECTURE = "general.architecture"
DRAFTER = "dflash"  # Architecture of block drafters; see block_drafter.py.
# Llama 3's scaling of rotary frequencies is stored as divisors of the frequencies only.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MAX_DEVIATION = 1e-4  # Relative; divisors are stored in float32.
_UNSCALED, _LLAMA3_NAME = "none", "llama3"
# Keys that state again what others do.
_IGNORED = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "feed_forward_length"}
_NEUTRAL = {
    **{"expert_count": 0, "expert_used_count": 0, "rope.scale_linear": 1.0},
    **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
}

Keys = TypeVar("Keys", bound=FamilyKeys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DecoderKeys:
    """Metadata that targets and drafters share, by fields of config.json where it has them."""

    num_hidden_layers: Annotated[int, "block_count"]
    max_position_embeddings: Annotated[int, "context_length"]
    hidden_size: Annotated[int, "embedding_length"]
    num_attention_heads: Annotated[int, "attention.head_count"]
    num_key_value_heads: Annotated[int | None, "attention.head_count_kv"] = None
    rms_norm_eps: Annotated[float, "attention.layer_norm_rms_epsilon"]
    head_dim: Annotated[int | None, "attention.key_length"] = None
    value_dim: Annotated[int | None, "attention.value_length"] = None
    rotated_dim: Annotated[int | None, ROTATED] = None
    rope_theta: Annotated[float, "rope.freq_base"] = 10_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ScalingKeys:
    rope_type: Annotated[str, "rope.scaling.type"] = _UNSCALED


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LinearKeys(_ScalingKeys):
    factor: Annotated[float, "rope.scaling.factor"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _YarnKeys(_LinearKeys):
    original_max_position_embeddings: Annotated[int, "rope.scaling.original_context_length"]


_SCALED = {"yarn": _YarnKeys, "linear": _LinearKeys}


def family_of(header: GgufHeader) -> Family:
    """Returns the family of a file."""
    name = str(header.metadata.get(ARCHITECTURE))
    if name not in FAMILIES:
        raise errors.CheckpointError(
            f"{header.file}: architecture {name!r} is not supported, only "
            f"{', '.join((*FAMILIES, DRAFTER))}"
        )
    return FAMILIES[name]


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the contents of a config.json for the model in a file."""
    family, prefix = family_of(header), f"{header.metadata[ARCHITECTURE]}."
    config, keys = decoder_of(header, prefix, family.keys)
    if EMBEDDING not in header.tensors:
        raise errors.CheckpointError(f"{header.file}: the tensor {EMBEDDING!r} is missing")
    try:
        family_fields = keys.fields(header, config)
    except ValueError as error:
        raise file_header.unsupported(header.file, f"{prefix}{error}") from error
    return {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        **config,
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in header.tensors,
        **family.implied,
        **family_fields,
    }


def decoder_of(header: GgufHeader, prefix: str, schema: type[Keys]) -> tuple[dict[str, Any], Keys]:
    """Returns the fields of config.json that targets and drafters share, and the other metadata.

    Args:
      schema: Dataclass of the other metadata.
    Raises:
      CheckpointError: An option in the file is missing, unknown, or not supported.
    """
    shared, further = header.read(_DecoderKeys, prefix), header.read(schema, prefix)
    further_keys = _keys_of(schema)
    _check_known(header, prefix, further_keys | _keys_of(_DecoderKeys) | _keys_of(_YarnKeys))
    heads, theta = shared.num_attention_heads, shared.rope_theta
    for name, value in (("attention.head_count", heads), ("rope.freq_base", theta)):
        if value < 1:
            raise file_header.unsupported(header.file, f"{prefix}{name} is {value}")
    size = shared.hidden_size // heads if shared.head_dim is None else shared.head_dim
    _check_head_sizes(header, prefix, shared, size, rotates_all=ROTATED not in further_keys)
    config = vars(shared) | {
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
        "rms_norm_eps": families.shortest(shared.rms_norm_eps),
        "num_key_value_heads": heads if (count := shared.num_key_value_heads) is None else count,
        "head_dim": size,
        "rope_theta": families.shortest(theta),
    }
    if ROPE_FACTORS in header.tensors:
        return config | {"rope_scaling": _llama3_scaling(header, config)}, further
    return config | {"rope_scaling": _stated_scaling(header, prefix)}, further


def _keys_of(schema: type) -> set[str]:
    return {key_of(field) for field in dataclasses.fields(schema)}


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
        **decoder_metadata(config, prefix, family.keys),
        prefix + ROTATED: config["head_dim"],
        prefix + "vocab_size": config["vocab_size"],
    }


def decoder_metadata(
    config: Mapping[str, Any], prefix: str, schema: type[FamilyKeys] = FamilyKeys
) -> dict[str, Any]:
    """Returns the metadata that targets and drafters share, and those of `schema`."""
    fields = *dataclasses.fields(_DecoderKeys), *dataclasses.fields(schema)
    values = {key_of(field): config[field.name] for field in fields if field.name in config}
    values["attention.value_length"] = config["head_dim"]
    for name in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        values[name] = float(values[name])
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] != _LLAMA3_NAME:
        values |= _scaling_metadata(scaling)
    return {prefix + name: value for name, value in values.items()}


def _scaling_metadata(scaling: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name: key_of(field) for field in dataclasses.fields(_YarnKeys)}
    for field in scaling.keys() - names.keys():
        raise errors.CheckpointError(
            f"config.json: rope_scaling: {field} cannot be written to a GGUF file"
        )
    return {names[field]: value for field, value in scaling.items()}


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the divisors of rotary frequencies of Llama 3's scaling; None without it."""
    scaling = config["rope_scaling"]
    if scaling is None or scaling["rope_type"] != _LLAMA3_NAME:
        return None
    return np.array(_divisors(config, scaling), np.float32)


def _check_known(header: GgufHeader, prefix: str, known: Collection[str]) -> None:
    """Checks that options in the file, without the prefix, are known ones, or change nothing."""
    options = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    unknown = [
        f"{prefix}{key}={value!s:.40}"
        for key, value in options.items()
        if key not in known and key not in _IGNORED and value != _NEUTRAL.get(key)
    ]
    if unknown:
        raise errors.CheckpointError(
            f"{header.file}: options of the model that are not supported: {', '.join(unknown)}"
        )


def _check_head_sizes(
    header: GgufHeader, prefix: str, decoder: _DecoderKeys, size: int, *, rotates_all: bool
) -> None:
    """Raises unless keys, values and, with `rotates_all`, rotated parts of heads have one size."""
    if size < 1:
        raise file_header.unsupported(header.file, f"{prefix}attention.key_length is {size}")
    sizes = {"attention.value_length": decoder.value_dim}
    if rotates_all:
        sizes[ROTATED] = decoder.rotated_dim
    for name, value in sizes.items():
        if value not in (None, size):
            raise errors.CheckpointError(
                f"{header.file}: {prefix}{name}: {value} is not supported with heads of {size}"
            )


def _stated_scaling(header: GgufHeader, prefix: str) -> dict[str, Any] | None:
    """Returns `rope_scaling` of config.json that the metadata state; None without scaling."""
    kind = header.read(_ScalingKeys, prefix).rope_type
    if kind == _UNSCALED:
        return None
    if kind not in _SCALED:
        raise errors.CheckpointError(
            f"{header.file}: {prefix}rope.scaling.type: {kind!r} is not supported, only "
            f"{' and '.join(map(repr, _SCALED))}"
        )
    return dict(vars(header.read(_SCALED[kind], prefix)))


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
