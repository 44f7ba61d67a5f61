"""Tools for chat templates that leave out joined schemas, such as Gemma 4's.

These render type, description, properties, items and enum of a schema, and nothing where it has
`$ref`, `anyOf`, `allOf` or `const`.
"""

import json
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.text.chat_formats import arguments

_MAX_DEPTH = 8  # of schemas that refer to themselves


def simplified(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a tool whose schema joins no others; unchanged if that is malformed."""
    function = tool.get("function", tool)
    root = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(root, Mapping):
        return tool
    try:
        function = {**function, "parameters": _simplified(root, root, 0)}
    except errors.InputError:
        return tool
    return {**tool, "function": function} if "function" in tool else function


def _simplified(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    flats = arguments.alternatives(schema, root)
    others = [flat for flat in flats if flat.get("type") not in ("null", ["null"])]
    flat = dict(others[0] if others else {"type": "null"})
    described = isinstance(schema, Mapping) and schema.get("description")
    if described:
        flat["description"] = described
    if len(others) > 1 or (depth == _MAX_DEPTH and flat.keys() & {"properties", "items"}):
        # The whole schema is a text where no single one stands for it.
        kept = {"type": flat.get("type", "object")}
        return kept | {"description": " ".join(filter(None, (described, json.dumps(schema))))}
    if "const" in flat:
        flat["enum"] = [flat.pop("const")]
    if "type" not in flat and all(isinstance(value, str) for value in flat.get("enum", [0])):
        flat["type"] = "string"
    if isinstance(flat.get("type"), list):
        kinds = [kind for kind in flat["type"] if kind != "null"]
        flat |= {"type": kinds[0]} | ({"nullable": True} if "null" in flat["type"] else {})
    if len(others) < len(flats):
        flat["nullable"] = True
    for name, item in flat.get("properties", {}).items():
        flat["properties"] = {**flat["properties"], name: _simplified(item, root, depth + 1)}
    if "items" in flat:
        flat["items"] = _simplified(flat["items"], root, depth + 1)
    return flat
