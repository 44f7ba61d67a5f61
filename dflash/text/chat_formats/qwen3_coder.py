"""Tool calls of Qwen3-Coder and Qwen3.5: tags, in which strings stand as they are.

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_VALUE_END = "\n</parameter>"
# Keywords that do not restrict a string.
_PLAIN = {"type", "title", "description", "default", "examples"}
# Keywords of the schema of the arguments that the format can express.
_KNOWN = _PLAIN | {"properties", "required", "additionalProperties", "$defs", "definitions"}
_KNOWN |= {"$schema", "$id", "strict"}


def _call(tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
    unknown = sorted(set(tool.parameters) - _KNOWN)
    if unknown and tool.strict:
        problem = f"{unknown[0]!r} is not supported by the target's format of calls"
        raise errors.InputError(f"{tool.name}: parameters: {problem}")
    required = tool.parameters.get("required", ())
    properties = _properties(tool)
    names = [
        f"parameter_{index}_{i}" + ("" if name in required else "?")
        for i, name in enumerate(properties)
    ]
    head = tokens.expression(f"\n<function={tool.name}>\n")
    end = tokens.expression(f"</function>\n{_CLOSING}")
    yield f"call_{index}: {' '.join([head, *names, end])}"
    for i, (name, schema) in enumerate(properties.items()):
        rule = f"parameter_{index}_{i}"
        head = tokens.expression(f"<parameter={name}>\n")
        yield f"{rule}: {head} {rule}_value"
        yield _value(f"{rule}_value", schema, tool, tokens)


def _value(rule: str, schema: Any, tool: Tool, tokens: TargetTokens) -> str:
    """Returns the Lark rule of a parameter's value and the tag after it."""
    end = f"{_VALUE_END}\n"
    strings = _strings(schema)
    if strings is not None:
        return f"{rule}: ({' | '.join(tokens.expression(one + end) for one in strings)})"
    if _is_plain_string(schema):
        return f"{rule}[lazy]: TEXT {tokens.expression(end)}"
    definitions = {
        name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters
    }
    schema = {**schema, **definitions} if isinstance(schema, Mapping) else schema
    return f"{rule}: {tool.expression(schema)} {tokens.expression(end)}"


def _properties(tool: Tool) -> dict[str, Any]:
    """Returns the schemas of the parameters; any value for required ones without a schema."""
    properties = dict(tool.parameters.get("properties", {}))
    return properties | {
        name: True for name in tool.parameters.get("required", ()) if name not in properties
    }


def _is_plain_string(schema: Any) -> bool:
    """Returns whether any string is valid, so that values are written without quotes."""
    if not isinstance(schema, Mapping) or not set(schema) <= _PLAIN | {"anyOf"}:
        return False
    if isinstance(schema.get("anyOf"), list):
        return any(map(_is_plain_string, schema["anyOf"]))
    kinds = schema.get("type")
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _strings(schema: Any) -> list[str] | None:
    """Returns the valid values, if they are certain strings; None otherwise."""
    if not isinstance(schema, Mapping) or not set(schema) <= _PLAIN | {"enum", "const"}:
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    if not isinstance(values, list) or not values:
        return None
    fits = all(isinstance(value, str) and _VALUE_END not in value for value in values)
    return values if fits else None


def _read(reader: Reader, rules: AnswerRules) -> Steps[None]:
    tools = {tool.name: _properties(tool) for tool in rules.tools}
    yield from reader.until(f"\n{_OPENING}", _OPENING, kind="content")
    while (yield from reader.until("<function=")) != END:
        name, marker = yield from reader.take(">\n")
        if marker == END:
            return
        yield OutputPart("call", name)
        yield from _read_arguments(reader, tools.get(name, {}))


def _read_arguments(reader: Reader, properties: Mapping[str, Any]) -> Steps[None]:
    separator = "{"
    while (marker := (yield from reader.until("<parameter=", "</function>"))) == "<parameter=":
        name, marker = yield from reader.take(">\n")
        if marker == END:
            return
        schema = properties.get(name, True)
        is_text = _is_plain_string(schema) or _strings(schema) is not None
        quote = '"' if is_text else ""
        change = _escape if is_text else str
        yield OutputPart("arguments", f"{separator}{json.dumps(name, ensure_ascii=False)}: {quote}")
        marker = yield from reader.until(_VALUE_END, kind="arguments", change=change)
        if marker == END:
            return
        yield OutputPart("arguments", quote)
        separator = ", "
    if marker != END:
        yield OutputPart("arguments", "{}" if separator == "{" else "}")


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


FORMAT = ToolFormat(
    signs=("<tool_call>", "<function="),
    markers=(_OPENING, _CLOSING),
    opening=_OPENING,
    call=_call,
    separator=f"\n{_OPENING}",
    read=_read,
)
