"""Malformed chats with tools."""

import copy
import random
from typing import Any

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("f", "g")
]
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
# Body of a valid chat.
CHAT = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "max_thinking_tokens": 5,
}
_JUNK = [None, True, 5, -1.5, "", "x" * 70, "é\ud800", [], [[]], {}, {"type": 5}, {"a": {}}]


def chat(chance: random.Random) -> dict[str, Any]:
    """Returns the body of a chat in which one place has another value; it may still be valid."""
    field = chance.choice(list(CHAT))
    return CHAT | {field: _spoil(CHAT[field], chance)}


def _spoil(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return copy.deepcopy(chance.choice(_JUNK))
    changed = copy.deepcopy(value)
    places = list(changed) if isinstance(changed, dict) else range(len(changed))
    place = chance.choice(list(places))
    changed[place] = _spoil(changed[place], chance)
    if isinstance(changed, dict) and chance.random() < 0.1:
        changed["unknown"] = changed.pop(place)
    return changed
