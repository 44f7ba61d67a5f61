"""Grammars over the tokens of the tiny target, which are made up for them."""

import functools
import json

import pytest

from dflash.text import grammar, grammar_compiler
from dflash.text.grammar import Grammar, Vocabulary
from dflash.text.token_bytes import TokenBytes
from support.engines import decode

# The tokens that the tiny target prefers come first.
TEXTS = ["a", "{", '"', "1", *"}b:,[]20-. ", '{"', '":', "12", '"}', "tru", "null", "e", None, None]
END = len(TEXTS) - 1


@functools.cache
def vocabulary() -> Vocabulary:
    """The tiny target's 24 tokens; END has no text."""
    pytest.importorskip("llguidance", reason="pip install 'dflash-jax[grammar]'")
    return Vocabulary(TokenBytes(tuple(text and text.encode() for text in TEXTS)))


def text_of(ids) -> str:
    """What tokens write."""
    return "".join(TEXTS[token] or "" for token in ids)


@functools.cache
def regex(pattern: str) -> Grammar:
    return grammar.of_source("regex", pattern, vocabulary())


@functools.cache
def json_schema(schema: str) -> Grammar:
    return grammar.of_source("json_schema", schema, vocabulary())


def decode_some(run, prompts, limits, **how) -> list[tuple[int, ...]]:
    """Outputs of prompts, of which every other one has a grammar and a penalty."""
    constrained = {"grammar": regex("(a|1|tru){4,20}"), "presence_penalty": 1.0}
    each = [{} if i % 2 else constrained for i in range(len(prompts))]
    done = decode(run, prompts, limits, each=each, stop_ids=(END,), logprobs=1, **how)
    return [one.output_ids for one in done]


def flat_object(**properties) -> str:
    """A schema of an object with exactly these properties."""
    return json.dumps(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


def replace_check(monkeypatch, directory, name: str, *body: str) -> None:
    """Lets another program check grammars: a module whose `main` has this body."""
    monkeypatch.syspath_prepend(directory)
    lines = ["import os, time", "from dflash.text import grammar_check"]
    lines += ["def main():", *(f"    {line}" for line in body)]
    (directory / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.setattr(grammar_compiler, "_PROGRAM", name)
