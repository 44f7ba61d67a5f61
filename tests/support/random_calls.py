"""Random answers that grammars allow, for random tools."""

import codecs
import functools
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dflash.text.chat_formats.reader import OutputPart
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool
from dflash.text.chat_formats.table import FORMATS, ChatFormat
from dflash.text.grammar import Grammar, Vocabulary
from dflash.text.token_bytes import TokenBytes

MAX_TOKENS = 6000
_CLOSING = b'"}]\n'  # Bytes that end something, which random outputs otherwise rarely do.


def schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """Returns a random JSON schema."""
    leaves = [
        lambda: {"type": "string"},
        lambda: {"type": "string", "maxLength": chance.randint(0, 9)},
        lambda: {"type": "string", "pattern": "^[a-z]{1,4}-[0-9]+$"},
        lambda: {"type": ["string", "null"], "description": "a </parameter> b"},
        lambda: {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        lambda: {"enum": chance.sample(["a", "b c", 'd"', "é", "\n", ""], 3)},
        lambda: {"enum": [1, "1", None, True]},
        lambda: {"const": "only"},
        lambda: {"type": "integer", "minimum": chance.randint(-9, 0), "maximum": 99},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"$ref": "#/$defs/color"},
        lambda: {"type": "string", "format": "date"},
    ]
    if depth and chance.random() < 0.4:
        inner = schema(chance, depth - 1)
        if chance.random() < 0.5:
            return {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
        return _object(chance, depth - 1)
    return chance.choice(leaves)()


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["city", "title", "n", "two words", "enum", "é", 'quote"d'], 3)
    properties = {name: schema(chance, depth) for name in names}
    required = [name for name in names if chance.random() < 0.6]
    closed = chance.choice([{"additionalProperties": False}, {}])
    return {"type": "object", "properties": properties, "required": required} | closed


def tools(chance: random.Random) -> tuple[Tool, ...]:
    """Returns one to three random tools."""
    colors = {"$defs": {"color": {"enum": ["red", "blue"]}}}
    return tuple(
        Tool(f"tool-{number}", _object(chance, 2) | colors)
        for number in range(chance.randint(1, 3))
    )


@functools.cache
def tokens_of(name: str, special: bool) -> tuple[Vocabulary, Mapping[int, str]]:
    """Returns bytes and the markers of a format, and the spellings of the special tokens."""
    pytest.importorskip("llguidance", reason="pip install 'dflash-jax[grammar]'")
    markers = sorted(ChatFormat(FORMATS[name], True).markers)
    texts = [None if special else marker.encode() for marker in markers]
    spellings = {256 + i: marker for i, marker in enumerate(markers)} if special else {}
    end = 256 + len(markers)
    table = TokenBytes((*(bytes([byte]) for byte in range(256)), *texts, None))
    return Vocabulary(table), spellings | {end: "<|im_end|>"}


def answer(
    name: str, rules: AnswerRules, chance: random.Random, *, special: bool
) -> tuple[str, list[OutputPart]]:
    """Returns a random answer under the rules, and its parts."""
    vocabulary, spellings = tokens_of(name, special)
    end = vocabulary.end - 1
    chat_format = ChatFormat(FORMATS[name], True)
    source = chat_format.grammar(rules, TargetTokens(spellings, vocabulary))
    matcher = Grammar("lark", source, vocabulary).matcher(timed=False)
    written: list[int] = []  # Tokens that end a parameter of Qwen3-Coder, which only chance would.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    parser, parts, text = chat_format.parser(rules), [], ""
    masks = np.zeros((1, end // 32 + 1), np.int32)
    for _ in range(MAX_TOKENS):
        matcher.fill(masks, ends=(end,))
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        token = _choose(np.flatnonzero(bits[: end + 1]).tolist(), end, chance, written)
        if token == end:
            assert matcher.may_end, (matcher.problem, source, text)
            return text, [*parts, *parser.push("", final=True)]
        matcher.advance([token])
        is_text = token not in spellings
        piece = decoder.decode(vocabulary.tokens.tokens[token]) if is_text else spellings[token]
        text += piece
        parts += parser.push(piece)
    raise AssertionError(f"no end after {MAX_TOKENS} tokens: {text[-200:]!r}")


def _choose(allowed: list[int], end: int, chance: random.Random, written: list[int]) -> int:
    """Returns one of the allowed tokens; those that end something are likelier."""
    if not written and chance.random() < 0.05:
        written += b"\n</parameter>\n"
    if written and (token := written.pop(0)) in allowed:
        return token
    written.clear()
    ending = [token for token in allowed if token >= 256 or token in _CLOSING]
    if end in allowed and chance.random() < 0.5:
        return end
    return chance.choice(ending if ending and chance.random() < 0.3 else allowed)


def calls_of(parts: list[OutputPart]) -> list[tuple[str, str]]:
    """Returns the names and the arguments of all calls."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.kind == "call":
            calls.append((part.text, ""))
        elif part.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return calls


def check(name: str, seed: int, *, special: bool) -> int:
    """Checks the calls of a random answer with random tools, and returns their number."""
    jsonschema = pytest.importorskip("jsonschema")
    chance = random.Random(seed)
    rules = AnswerRules(
        tools=tools(chance),
        must_call=chance.random() < 0.8,
        parallel=chance.random() < 0.5,
        thinking=chance.choice([None, "opened", "optional"]),
    )
    text, parts = answer(name, rules, chance, special=special)
    calls = calls_of(parts)
    assert bool(calls) or not rules.must_call, text
    assert len(calls) <= 1 or rules.parallel, text
    schemas = {tool.name: tool.parameters for tool in rules.tools}
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[called])
    return len(calls)


def arguments(name: str, schema: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns the arguments of a random call with a schema, which they match."""
    jsonschema = pytest.importorskip("jsonschema")
    rules = AnswerRules(tools=(Tool("f", schema),), must_call=True, parallel=False)
    ((_, written),) = calls_of(answer(name, rules, random.Random(seed), special=True)[1])
    jsonschema.validate(values := json.loads(written), schema)
    return values


def thought(name: str, limit: int, seed: int) -> int:
    """Returns the number of tokens of a random answer's reasoning, which has a limit."""
    rules = AnswerRules(thinking="opened", max_thinking_tokens=limit)
    chance = random.Random(seed)
    text, _ = answer(name, rules, chance, special=True)
    if name == "harmony":
        _, found, text = text.partition("<|channel|>analysis<|message|>")
        return len(text.partition("<|end|>")[0].encode(errors="surrogateescape")) if found else 0
    return len(text.partition("</think>")[0].encode(errors="surrogateescape"))
