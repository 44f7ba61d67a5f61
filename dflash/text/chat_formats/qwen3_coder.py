"""Tool calls of Qwen3-Coder and Qwen3.5: tags, in which strings stand as they are.

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.text.chat_formats import arguments
from dflash.text.chat_formats.arguments import Flat
from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps, escaped
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_VALUE_END = "\n</parameter>"
# Keywords of the arguments that the format cannot express.
_UNSUPPORTED = frozenset(
    "minProperties maxProperties patternProperties propertyNames unevaluatedProperties enum const "
    "dependentRequired dependentSchemas dependencies if then else not $dynamicRef $recursiveRef"
    "".split()
)


def _call(tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
    head = tokens.expression(f"\n<function={tool.name}>\n")
    end = tokens.expression(f"</function>\n{_CLOSING}")
    are_texts, calls = _are_texts(tool), []
    for flat in _alternatives(tool):
        parameters = []
        for name, schema in _parameters(flat, tool).items():
            rule = f"parameter_{index}_{len(calls)}_{len(parameters)}"
            named = tokens.expression(f"<parameter={name}>\n")
            if name is None:
                named = f'"<parameter=" NAME_{index} ">\\n"'
            yield f"{rule}: {named} {rule}_value"
            yield _value(f"{rule}_value", schema, are_texts[name], tool, tokens)
            is_required = name in flat.get("required", ())
            parameters.append(rule + ("*" if name is None else "?" * (not is_required)))
        calls.append(" ".join([head, *parameters, end]))
    yield f"call_{index}: {' | '.join(calls)}"
    taken = "".join(f" & ~{json.dumps(name)}" for name in are_texts if name is not None)
    yield f"NAME_{index}: /[^<>\\n]{{1,64}}/{taken}"


def _alternatives(tool: Tool) -> list[Flat]:
    """Returns schemas of which the arguments match one; raises if they cannot be written."""
    for flat in tool.alternatives:
        keywords = {*flat}.union(*flat.get("allOf", ()))
        if unsupported := sorted(keywords & _UNSUPPORTED):
            problem = "is not supported by the target's format of calls"
            raise errors.InputError(f"{unsupported[0]!r} {problem}")
    possible = [
        flat
        for flat in tool.alternatives
        if _parameters(flat, tool).keys() >= {*flat.get("required", ())}
    ]
    if not possible:
        raise errors.InputError("no arguments match")
    return possible


def _parameters(flat: Flat, tool: Tool) -> dict[str | None, Any]:
    """Returns the schemas of the possible parameters by name, and that of all others as None."""
    default = flat.get("additionalProperties", True)
    required = dict.fromkeys(flat.get("required", ()), default)
    parameters = {**required, **flat.get("properties", {}), None: default}
    is_possible = functools.partial(arguments.alternatives, root=tool.parameters)
    return {name: schema for name, schema in parameters.items() if is_possible(schema)}


def _are_texts(tool: Tool) -> dict[str | None, bool]:
    """Returns whether each parameter is written as text, and not as JSON."""
    are_texts: dict[str | None, bool] = {}
    for flat in tool.alternatives:
        for name, schema in _parameters(flat, tool).items():
            is_text = _strings(schema, tool) is not None
            are_texts[name] = are_texts.get(name, True) and is_text
    return are_texts


def _value(rule: str, schema: Any, is_text: bool, tool: Tool, tokens: TargetTokens) -> str:
    """Returns the Lark rule of a parameter's value and the tag after it."""
    end = f"{_VALUE_END}\n"
    if not is_text:
        return f"{rule}: {tool.expression(schema)} {tokens.expression(end)}"
    strings = _strings(schema, tool)
    if strings:
        return f"{rule}: ({' | '.join(tokens.expression(text + end) for text in strings)})"
    return f"{rule}[lazy]: TEXT {tokens.expression(end)}"


def _strings(schema: Any, tool: Tool) -> list[str] | None:
    """Returns the strings that are valid, empty for all; None if values need to be JSON."""
    flats = arguments.alternatives(schema, tool.parameters)
    if any(flat.keys() == {"type"} and "string" in flat["type"] for flat in flats):
        return []
    flat = flats[0] if len(flats) == 1 else {}
    values = [flat["const"]] if "const" in flat else flat.get("enum", [])
    is_enum = flat.keys() <= {"type", "enum"} or flat.keys() <= {"type", "const"}
    fits = all(isinstance(value, str) and _VALUE_END not in value for value in values)
    return (
        values if values and is_enum and fits and "string" in flat.get("type", "string") else None
    )


def _read(reader: Reader, rules: AnswerRules) -> Steps[None]:
    tools = {tool.name: _are_texts(tool) for tool in rules.tools}
    lines = (f"\n\n{_OPENING}", f"\n{_OPENING}")  # Qwen3.5 and later write an empty line.
    yield from reader.until(*lines, _OPENING, kind="content")
    while (yield from reader.until("<function=")) != END:
        name, marker = yield from reader.take(">\n")
        if marker == END:
            return
        yield OutputPart("call", name)
        yield from _read_arguments(reader, tools.get(name, {}))


def _read_arguments(reader: Reader, are_texts: Mapping[str | None, bool]) -> Steps[None]:
    separator = "{"
    while (marker := (yield from reader.until("<parameter=", "</function>"))) == "<parameter=":
        name, marker = yield from reader.take(">\n")
        if marker == END:
            return
        is_text = are_texts.get(name, are_texts.get(None, False))
        quote = '"' if is_text else ""
        change = escaped if is_text else str
        yield OutputPart("arguments", f"{separator}{json.dumps(name, ensure_ascii=False)}: {quote}")
        marker = yield from reader.until(_VALUE_END, kind="arguments", change=change)
        if marker == END:
            return
        yield OutputPart("arguments", quote)
        separator = ", "
    if marker != END:
        yield OutputPart("arguments", "{}" if separator == "{" else "}")


class _Qwen3Coder(ToolFormat):
    """Format whose arguments are tags."""

    markers = (_OPENING, _CLOSING)

    def call(self, tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
        return _call(tool, index, tokens)

    def read(self, reader: Reader, rules: AnswerRules) -> Steps[None]:
        return _read(reader, rules)


FORMAT = _Qwen3Coder(
    signs=("<tool_call>", "<function="), opening=_OPENING, separator=f"\n{_OPENING}"
)
