"""What an output has to match: OpenAI's response_format, and vLLM's and SGLang's ways to say so."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.serving.fields import ANYTHING, Fields, as_mapping
from dflash.serving.refusal import Refusal, unsupported
from dflash.text import grammar, jsonl
from dflash.text.grammar import Grammar, Kind, Vocabulary

_SOURCES = ("json", "regex", "grammar")  # of structured_outputs


@dataclasses.dataclass(frozen=True)
class Structure:
    """A grammar that is not compiled yet.

    Attributes:
      kind: what `source` is.
      source: text of the grammar.
      param: the field that it came in.
    """

    kind: Kind
    source: str
    param: str

    def compiled(self, vocabulary: Vocabulary) -> Grammar:
        """The grammar; may take seconds, so not for the event loop.

        Raises:
          Refusal: it cannot be used.
        """
        make = {"json_schema": grammar.json_schema, "regex": grammar.regex, "lark": grammar.lark}
        try:
            if self.kind == "json_object":
                return grammar.json_object(vocabulary)
            return make[self.kind](self.source, vocabulary)
        except errors.InputError as error:
            raise Refusal(f"{self.param}: {error}", param=self.param) from error


def of_openai(fields: Fields) -> Structure | None:
    """Of response_format, guided_json, guided_regex, guided_grammar, structured_outputs.

    Raises:
      Refusal: one of them cannot be used, or several are given.
    """
    found = [
        _response_format(fields.group("response_format")),
        _of_schema(fields.take("guided_json"), "guided_json"),
        _of_text(fields, "guided_regex", "regex"),
        _of_text(fields, "guided_grammar", "lark"),
    ]
    inner = fields.group("structured_outputs")
    found += [
        _of_schema(inner.take("json"), "structured_outputs.json"),
        _of_text(inner, "regex", "regex"),
        _of_text(inner, "grammar", "lark"),
        Structure("json_object", "", inner.path("json_object"))
        if inner.flag("json_object")
        else None,
    ]
    inner.finish({"disable_any_whitespace": (False,)})
    return _only(found)


def of_sglang(fields: Fields) -> Structure | None:
    """Of json_schema (a text), regex and ebnf (Lark).

    Raises:
      Refusal: see `of_openai`.
    """
    return _only(
        [
            _of_schema(fields.take("json_schema"), fields.path("json_schema")),
            _of_text(fields, "regex", "regex"),
            _of_text(fields, "ebnf", "lark"),
        ]
    )


def _only(found: list[Structure | None]) -> Structure | None:
    given = [one for one in found if one is not None]
    if len(given) > 1:
        message = f"{given[1].param}: {given[0].param} is given too; keep one of them"
        raise Refusal(message, param=given[1].param)
    return given[0] if given else None


def _response_format(form: Fields) -> Structure | None:
    kind = form.text("type")
    schema = form.group("json_schema")
    path = form.path("json_schema")
    form.finish()
    match kind:
        case "json_schema":
            found = _of_schema(schema.take("schema"), f"{path}.schema")
            schema.finish({"name": ANYTHING, "description": ANYTHING, "strict": ANYTHING})
            if found is None:
                raise Refusal(f"{path}.schema: required", param=f"{path}.schema")
            return found
        case "json_object":
            return Structure("json_object", "", "response_format")
        case "text" | None:
            return None
    expected = "'text', 'json_object' or 'json_schema'"
    param = form.path("type")
    raise unsupported(param, f"expected {expected}; got {jsonl.quote(kind)}")


def _of_schema(value: Any, param: str) -> Structure | None:
    """A schema, given as an object or as its text."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = jsonl.parse_json(value)
        except errors.InputError as error:
            raise Refusal(f"{param}: {error}", param=param) from error
    schema: Mapping[str, Any] = as_mapping(value, param)
    return Structure("json_schema", json.dumps(schema, ensure_ascii=False), param)


def _of_text(fields: Fields, name: str, kind: Kind) -> Structure | None:
    text = fields.text(name)
    return None if text is None else Structure(kind, text, fields.path(name))
