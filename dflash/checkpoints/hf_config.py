"""Conversion between Hugging Face's config.json and the architecture dataclasses."""

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from dflash import errors
from dflash.config import checks, typed
from dflash.config.schema import HF_ALIASES, RopeScaling, TargetArchitecture, option_like

FILE = "config.json"
_NEW_ROPE, _OLD_ROPE = "rope_parameters", "rope_scaling"

Fields = TypeVar("Fields")
Architecture = TypeVar("Architecture", bound=TargetArchitecture)


class _ScalingFields(NamedTuple):
    """Fields of config.json for a type of rotary scaling."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


_COMMON = "factor", "original_max_position_embeddings"
_SCALING_FIELDS = {
    "linear": _ScalingFields(("factor",)),
    "llama3": _ScalingFields((*_COMMON, "low_freq_factor", "high_freq_factor")),
    "yarn": _ScalingFields(
        _COMMON,
        ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}


@dataclasses.dataclass(frozen=True)
class _Classes:
    architectures: tuple[str, ...] = ()


def read_fields(
    config: Mapping[str, Any], schema: type[Fields], *, group: str = "", file: str = FILE
) -> Fields:
    """Reads the fields of a dataclass from a JSON file, with the checks of config keys.

    Args:
      config: Contents of a JSON file, or of a mapping in it. Fields that `schema` does not have are
        ignored, and a null field counts as missing. An alias is read if the field itself is absent.
      schema: Dataclass whose fields have types, and bounds and aliases that `option` declares.
      group: Name of the mapping in the file; empty for the file itself.
    Raises:
      CheckpointError: A field without a default is missing, or a value has another type or is out
        of bounds; one line for each.
    """
    place = f"{file}: {group}" if group else file
    built, missing, problems = typed.build_from_json(_renamed(config, schema), schema, place)
    if missing:
        raise errors.CheckpointError(f"{place}: missing {', '.join(missing)}")
    if problems:
        raise errors.CheckpointError("\n".join(problems))
    return built


def _renamed(config: Mapping[str, Any], schema: type) -> Mapping[str, Any]:
    """Adds the fields of a dataclass that a file has under an alias."""
    for field in dataclasses.fields(schema):
        for alias in field.metadata.get(HF_ALIASES, ()):
            if alias in config and field.name not in config:
                config = {**config, field.name: config[alias]}
    return config


def read_some(
    config: Mapping[str, Any],
    schema: type,
    names: Iterable[str],
    defaults: Mapping[str, Any] | None = None,
    *,
    group: str = "",
    file: str = FILE,
) -> dict[str, Any]:
    """Reads the fields `names` of a dataclass; see `read_fields`.

    A field without one of the `defaults` is required, and may be None if that is its default.
    """
    kinds, defaults = typing.get_type_hints(schema), defaults or {}
    fields = []
    for name in names:
        default = defaults.get(name, dataclasses.MISSING)
        kind = kinds[name] | None if default is None else kinds[name]
        fields.append((name, kind, option_like(schema, name, default)))
    part = dataclasses.make_dataclass(schema.__name__, fields, kw_only=True)
    return vars(read_fields(config, part, group=group, file=file))


def added_fields(schema: type, base: type) -> list[str]:
    """Returns the names of the fields that a dataclass adds to those of a base."""
    return [name for name in schema.__dataclass_fields__ if name not in base.__dataclass_fields__]


def read_group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the mapping `config[name]`, or an empty one if it is missing or null."""
    group = config.get(name)
    if group is None:
        return {}
    if not isinstance(group, Mapping):
        raise errors.CheckpointError(
            f"{FILE}: {name}: expected a mapping or null, got {_show(group)}"
        )
    return group


def check_only(config: Mapping[str, Any], name: str, supported: Any) -> None:
    """Checks a field whose default is the only supported value."""
    value = config.get(name)
    if value is None or (type(value) is type(supported) and value == supported):
        return
    raise errors.CheckpointError(
        f"{FILE}: {name}: {_show(value)} is not supported, only {_show(supported)}"
    )


def read_architecture(
    config: Mapping[str, Any],
    schema: type[Architecture] = TargetArchitecture,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> Architecture:
    """Reads an architecture from config.json; `defaults` are of fields that the file leaves out."""
    config = {key: config[key] for key in config if (key, config[key]) != (_NEW_ROPE, None)}
    config = {**(defaults or {}), **_renamed(config, schema)}
    for name, supported in schema.HF_FIXED:
        check_only(config, name, supported)
    names = added_fields(schema, TargetArchitecture)
    fields = read_some(config, schema, names, _defaults(schema))
    decoder = _read_decoder({**config, **schema.hf_overrides(fields)})
    arch = schema(**vars(decoder), **fields)
    problems = [f"{FILE}: {keys[0]}: {message}" for keys, message in checks.shape_problems(arch)]
    if problems:
        raise errors.CheckpointError("\n".join(problems))
    return arch


def _read_decoder(config: Mapping[str, Any]) -> TargetArchitecture:
    check_only(config, "hidden_act", "silu")
    theta, scaling = _read_rope(config)
    flat = {key: value for key, value in config.items() if key != _OLD_ROPE}
    sizes = read_some(
        flat | {"eos_token_id": _listed(config)},
        TargetArchitecture,
        TargetArchitecture.__dataclass_fields__,
        _defaults(TargetArchitecture) | {"num_key_value_heads": None, "head_dim": None},
    )
    heads = sizes["num_attention_heads"]
    follows = {
        "num_key_value_heads": sizes["num_key_value_heads"] or heads,
        "head_dim": sizes["head_dim"] or sizes["hidden_size"] // heads,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    return TargetArchitecture(**sizes | follows)


def with_rope_scaling(arch: TargetArchitecture, scaling: RopeScaling) -> TargetArchitecture:
    """Returns the architecture with another rotary scaling, and its context length."""
    length = int(scaling.factor * scaling.original_max_position_embeddings)
    return dataclasses.replace(arch, rope_scaling=scaling, max_position_embeddings=length)


def write_architecture(arch: TargetArchitecture) -> dict[str, Any]:
    """Returns the config.json fields of an architecture, for `read_architecture`."""
    config = {
        key: (list(value) or None) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(arch).items()
    }
    if arch.rope_scaling is not None:
        named = _SCALING_FIELDS[arch.rope_scaling.rope_type]
        defaults = vars(RopeScaling())
        config["rope_scaling"] = {"rope_type": arch.rope_scaling.rope_type} | {
            key: value
            for key, value in config["rope_scaling"].items()
            if key in named.required or (key in named.optional and value != defaults[key])
        }
    return config | {"hidden_act": "silu", "attention_bias": False}


def read_eos_token_ids(config: Mapping[str, Any], *, file: str = FILE) -> tuple[int, ...] | None:
    """Returns the end-of-sequence ids of a JSON config; None if it has none."""
    fields = {"eos_token_id": _listed(config)}
    return _read_one(fields, "eos_token_id", file=file)


def _read_one(config: Mapping[str, Any], name: str, **place: str) -> Any:
    """Reads one field of `TargetArchitecture`; None if it is missing."""
    return read_some(config, TargetArchitecture, [name], {name: None}, **place)[name]


def _defaults(schema: type) -> dict[str, Any]:
    fields = dataclasses.fields(schema)
    return {field.name: field.default for field in fields}


def read_classes(config: Mapping[str, Any], *, file: str = FILE) -> tuple[str, ...]:
    """Returns the class names under `architectures`, usually one."""
    return read_fields(config, _Classes, file=file).architectures


def _read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns the base and the scaling of the rotary embedding.

    Newer files hold both in one mapping. Where fields are stated twice, the precedence is that of
    transformers: `rope_scaling` replaces `rope_parameters`, and a base in the mapping that is used
    takes precedence over one at the top level.
    """
    name = _NEW_ROPE if config.get(_OLD_ROPE) in (None, {}) else _OLD_ROPE
    rope = read_group(config, name)
    theta = _read_one(rope, "rope_theta", group=name)
    if theta is None:
        theta = _read_one(config, "rope_theta")
    if theta is None:
        raise errors.CheckpointError(
            f"{FILE}: missing rope_theta (neither at the top level nor in {name})"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in _SCALING_FIELDS:
        names = ", ".join(map(repr, ("default", *_SCALING_FIELDS)))
        raise errors.CheckpointError(
            f"{FILE}: rope type {_show(kind)} is not supported, only one of {names}"
        )
    required = _SCALING_FIELDS[kind].required
    if _COMMON[1] in required and config.get("max_position_embeddings") is not None:
        rope = {_COMMON[1]: config["max_position_embeddings"], **rope}
    missing = [field for field in required if rope.get(field) is None]
    if missing:  # The schema's defaults are for configs; a checkpoint must have these fields.
        raise errors.CheckpointError(f"{FILE}: rope scaling lacks {', '.join(missing)}")
    return theta, read_fields({**rope, "rope_type": kind}, RopeScaling, group=name)


def _listed(config: Mapping[str, Any]) -> Any:
    """Returns `eos_token_id` as a list; files may have a single id instead."""
    ids = config.get("eos_token_id")
    return ids if ids is None or isinstance(ids, list) else [ids]


def _show(value: Any) -> str:
    """Returns a JSON value in the form in which messages quote it."""
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= typed.LONGEST_QUOTED else f"{text[: typed.LONGEST_QUOTED]}…"
