"""Encoding of values that processes exchange: strict JSON, so that reading one never runs code.

JAX's coordination service and its collectives on CPUs authenticate nobody, so a received message
can come from any machine that reaches their ports. JSON's own types stand for themselves, except
that every object has exactly one key, which tells what its value is:

    {"map": {…}}        a mapping with string keys
    {"tuple": […]}      a tuple
    {"Name": {…}}       a dataclass of this name with its fields; the reader lists which are allowed
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_MAP, _TUPLE = "map", "tuple"


def encode(value: Any) -> bytes:
    """Encodes a value.

    Args:
      value: None, a bool, number or string, or a list, tuple, mapping with string keys, or
        dataclass of such values. NumPy scalars become Python numbers.
    Raises:
      TypeError: The value has another type.
    """
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode(message: bytes, types: Sequence[type] = ()) -> Any:
    """Decodes what `encode` has returned.

    Args:
      message: Bytes from another process; they need not be trusted.
      types: Dataclasses that the message may contain.
    Raises:
      ValueError: The message is not JSON of this encoding, or contains another dataclass.
    """
    try:
        return _from_json(json.loads(message.decode()), {kind.__name__: kind for kind in types})
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item) for item in value]}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping with keys that are not strings cannot be sent")
        return {_MAP: {key: _to_json(item) for key, item in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return {type(value).__name__: {name: _to_json(getattr(value, name)) for name in fields}}
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to other processes")


def _from_json(value: Any, types: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, types) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"an object with {len(value)} keys, expected 1")
    ((tag, content),) = value.items()
    if tag == _TUPLE and isinstance(content, list):
        return tuple(_from_json(item, types) for item in content)
    if tag != _MAP and tag not in types:
        raise ValueError(f"{tag!r} is not among the expected types")
    if not isinstance(content, dict):
        raise ValueError(f"the content of {tag!r} is not an object")
    decoded = {key: _from_json(item, types) for key, item in content.items()}
    if tag == _MAP:
        return decoded
    expected = {field.name for field in dataclasses.fields(types[tag])}
    if decoded.keys() != expected:
        wrong = sorted(decoded.keys() ^ expected)
        raise ValueError(f"{tag!r}: fields are missing or unknown: {', '.join(wrong)}")
    return types[tag](**decoded)
