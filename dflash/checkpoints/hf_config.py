"""Hugging Face's config.json <-> our architecture dataclasses; drafters carry the same fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.config.schema import RopeScaling, TargetArchitecture

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def read_architecture(config: Mapping[str, Any]) -> TargetArchitecture:
    """Reads the decoder shape that config.json states.

    Raises:
      CheckpointError: a field is missing, or asks for what the layers do not do.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise errors.CheckpointError(
            f"config.json: hidden_act: {config['hidden_act']!r} is not supported, only 'silu'"
        )
    missing = [name for name in _REQUIRED if config.get(name) is None]
    if missing:
        raise errors.CheckpointError(f"config.json: missing {', '.join(missing)}")
    heads = config["num_attention_heads"]
    eos = config.get("eos_token_id")
    return TargetArchitecture(
        **{name: config[name] for name in _REQUIRED},
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config),
        rope_scaling=_rope_scaling(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_id=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
    )


def write_architecture(arch: TargetArchitecture) -> dict[str, Any]:
    """The fields of config.json that state this shape; `read_architecture` reads them back."""
    config = dataclasses.asdict(arch)
    config["eos_token_id"] = list(arch.eos_token_id)
    if arch.rope_scaling is not None:
        config["rope_scaling"]["rope_type"] = "llama3"
    return config | {"hidden_act": "silu", "attention_bias": False}


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer files hold everything about rotary embedding in `rope_parameters`."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_theta(config: Mapping[str, Any]) -> float:
    theta = config.get("rope_theta")
    if theta is None:
        theta = _rope(config).get("rope_theta")
    if theta is None:
        raise errors.CheckpointError(
            "config.json: missing rope_theta (neither at the top level nor in rope_parameters)"
        )
    return float(theta)


def _rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise errors.CheckpointError(
            f"config.json: rope type {kind!r} is not supported, only 'default' and 'llama3'"
        )
    fields = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in fields if name not in rope]
    if missing:
        raise errors.CheckpointError(f"config.json: rope scaling lacks {', '.join(missing)}")
    scaling = RopeScaling(**{name: rope[name] for name in fields})
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise errors.CheckpointError(
            "config.json: rope scaling: low_freq_factor is not below high_freq_factor"
        )
    return scaling
