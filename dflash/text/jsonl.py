"""JSONL files: reading of lines, checks of their fields, and error messages about them."""

import codecs
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from dflash import errors
from dflash.config import encoding, schema
from dflash.storage import paths

MAX_DEPTH = 100  # nesting depth of values
# Each token takes at least one byte, so the prompt of a longer line exceeds every context length.
MAX_LINE_BYTES = schema.MAX_TOKENS
MAX_PROBLEMS_SHOWN = 10
MAX_QUOTED_CHARACTERS = 60
EMPTY = (None, "", [], {})  # values of fields that mean the same as no field
PLAIN_FIELDS = frozenset(("role", "content", "name"))  # of messages without calls or reasoning
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names of an answer's reasoning
ASKING = ("system", "developer", "user")  # roles whose messages must have a content
PROMPT_KINDS = ("prompt", "messages", "turns", "prompt_ids")
LATER_TURNS = "later turns"  # internal field of a conversation; no JSONL field has this name
_VARIABLES = ("tools", "documents")  # fields of a line that chat templates know
# Fields of lines and messages that hold other inputs than text.
_MEDIA = (
    *("image", "images", "image_url", "image_urls"),
    *("video", "videos", "video_url", "audio", "audios", "input_audio"),
)


@dataclasses.dataclass(frozen=True)
class PromptLine:
    """Checked prompt of a line, which has either ids, text or messages.

    Attributes:
      later_turns: Further messages of the user, each of which follows an answer of the model.
      variables: Variables of the chat template, such as "tools".
    """

    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    later_turns: tuple[str, ...] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def entries(file: str) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yields the place of each line, such as "a.jsonl:7", and a function that parses it.

    A line is parsed only when its function is called, so that all bad lines can be reported.

    Raises:
      InputError: The file cannot be read. The functions raise it if the line is not a JSON object.
    """
    try:
        with paths.to_path(file).open("rb") as lines:
            for place, line in placed_lines(lines, file):
                yield place, lambda line=line: parse_json(decode(line))
    except (OSError, ValueError) as error:  # ValueError: null character in the name
        reason = getattr(error, "strerror", None) or error
        raise errors.InputError(f"{file}: cannot be read: {reason}") from error


def placed_lines(lines: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yields the place, such as "NAME:7", and the content of each non-blank line."""
    for number in itertools.count(1):
        line = lines.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise errors.InputError(
                f"{name}:{number}: longer than {MAX_LINE_BYTES:,} bytes; expected JSON with one "
                "object per line"
            )
        if number == 1:
            try:
                encoding.check(line)
            except errors.InputError as error:
                raise errors.InputError(f"{name}: {error}") from error
            line = line.removeprefix(codecs.BOM_UTF8)  # some editors write a byte order mark
        if line.strip():
            yield f"{name}:{number}", line.removesuffix(b"\n").removesuffix(b"\r")


def decode(line: bytes) -> str:
    """Decodes a line as UTF-8; raises InputError with the place of the first invalid byte."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise errors.InputError(message) from error


def parse_json(line: str) -> Mapping[str, Any]:
    """Parses a line of a JSONL file: an object of finite numbers that is not nested too deep."""
    try:
        fields = json.loads(line, parse_constant=_finite, parse_float=_finite)
    except _NotFinite as error:
        raise errors.InputError(
            f"{_place_of_not_finite(line)}{error} is not a valid JSON number"
        ) from error
    except json.JSONDecodeError as error:
        raise errors.InputError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # huge integers, deep nesting
        raise errors.InputError(f"not usable JSON: {error}") from error
    if not isinstance(fields, dict):
        raise errors.InputError(f"expected a JSON object, not {quote(fields)}")
    if line.count("[") + line.count("{") > MAX_DEPTH:  # an upper bound
        deep = next((path for path, _ in _walk(fields) if len(path) > MAX_DEPTH), None)
        if deep is not None:
            raise errors.InputError(f"{place_of(deep)[:MAX_QUOTED_CHARACTERS]}…: nested too deep")
    return fields


class _NotFinite(Exception):
    """Non-finite number such as NaN, which only Python accepts in JSON."""


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _NotFinite(digits[:MAX_QUOTED_CHARACTERS])
    return number


def _place_of_not_finite(line: str) -> str:
    """Returns the place of the first non-finite number, such as "a[0].b: ".

    Returns "" if the number has no place: the line is not JSON elsewhere, or a later field of the
    same name replaces the number.
    """
    try:
        values = _walk(json.loads(line))
    except (ValueError, RecursionError):
        return ""
    for path, value in values:
        if isinstance(value, float) and not math.isfinite(value):
            return f"{errors.shorten(place_of(path), MAX_QUOTED_CHARACTERS)}: "
    return ""


def _walk(
    value: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields (path, value) of nested values, outer ones first, down to one beyond `MAX_DEPTH`.

    The path has the keys and indices that lead to the value.
    """
    yield path, value
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items if len(path) <= MAX_DEPTH else ():
        yield from _walk(item, (*path, key))


def place_of(path: Iterable[str | int]) -> str:
    """Returns the place of a value, such as "messages[0].role", from its keys and indices."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def check_prompt(fields: Mapping[str, Any]) -> PromptLine:
    """Checks the fields of a prompt, of which exactly one is among `PROMPT_KINDS`."""
    check_no_media(fields)
    kinds = [kind for kind in PROMPT_KINDS if kind in fields]
    if len(kinds) != 1:
        present = " and ".join(kinds) if kinds else "none of them"
        raise errors.InputError(
            f"expected exactly one of {', '.join(PROMPT_KINDS)}; found {present}"
        )
    value, variables = fields[kinds[0]], check_variables(fields)
    if "prompt_ids" in fields:
        return PromptLine(ids=check_ids(value))
    if "prompt" in fields:
        return PromptLine(text=check_text(value), variables=variables)
    if "messages" in fields:
        later = tuple(fields.get(LATER_TURNS, ()))
        return PromptLine(None, None, check_messages(value), later, variables)
    if not isinstance(value, list) or not value:
        raise errors.InputError(f"turns: expected a list of texts, not {quote(value)}")
    first, *later = (check_text(turn, f"turns[{place}]") for place, turn in enumerate(value))
    return PromptLine(None, None, ({"role": "user", "content": first},), tuple(later), variables)


def check_text(value: Any, what: str = "prompt") -> str:
    """Checks that a field is a non-empty string, and returns it; errors name the field `what`."""
    if not isinstance(value, str):
        raise errors.InputError(f"{what}: expected a string, not {quote(value)}")
    if not value:
        raise errors.InputError(f"empty {what}")
    return check_unicode(value, what)


def check_unicode(text: str, where: str) -> str:
    """Checks that a text has no unpaired surrogates, which JSON allows and UTF-8 does not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise errors.InputError(f"{where}: {code} is an unpaired surrogate") from error
    return text


def check_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns a non-empty list of messages with role and content, in the form of `normalized`."""
    if not isinstance(value, list):
        raise errors.InputError(f"messages: expected a list, not {quote(value)}")
    if not value:
        raise errors.InputError("empty prompt: no messages")
    return tuple(_check_message(message, f"messages[{i}]") for i, message in enumerate(value))


def normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message of a conversation in the form that all sources of messages share.

    It has no empty fields, such as `"tool_calls": null`, but always a content: texts in a list are
    joined, and no content is an empty text, as templates expect. Reasoning is `reasoning_content`.
    """
    message = {key: item for key, item in message.items() if key == "content" or item not in EMPTY}
    refusal = message.pop("refusal", "")
    reasoning = [message.pop(name) for name in REASONING_FIELDS if name in message]
    if "content" in message or refusal or message.get("role") not in ASKING:
        content = _joined(message.get("content"))
        message["content"] = refusal if content in EMPTY else content
    return message | ({"reasoning_content": reasoning[0]} if reasoning else {})


def _joined(content: Any) -> Any:
    """Joins the texts of a list of parts; returns any other content unchanged."""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text", part.get("refusal")) for part in parts if isinstance(part, dict)]
    is_text = len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return "\n".join(texts) if is_text else content


def _check_message(message: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise errors.InputError(f"{where}: expected an object, not {quote(message)}")
    check_no_media(message, f"{where}.")
    _check_parts(message.get("content"), f"{where}.content")
    message = normalized(message)
    for key in ("role", "content", *message.keys() & {"reasoning_content"}):
        if key not in message:
            raise errors.InputError(f"{where}: no {key}")
        if not isinstance(message[key], str):
            raise errors.InputError(f"{where}.{key}: expected a string, not {quote(message[key])}")
        check_unicode(message[key], f"{where}.{key}")
    _check_calls(message.get("tool_calls", []), f"{where}.tool_calls")
    if message.keys() - {"role", "content"}:
        check_unicode(json.dumps(message, ensure_ascii=False), where)
    return message


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise errors.InputError(f"{where}: expected a list of objects, not {quote(calls)}")
    for place, call in enumerate(calls):
        function = call.get("function", call)
        if not isinstance(function, dict):
            shown = quote(function)
            raise errors.InputError(f"{where}[{place}].function: expected an object, not {shown}")
        try:
            parse_arguments(function.get("arguments"))
        except errors.InputError as error:
            raise errors.InputError(f"{where}[{place}].function.arguments: {error}") from error


def parse_arguments(value: Any) -> Mapping[str, Any]:
    """Returns the arguments of a call, which may be an object, its JSON text, or none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    value = parse_json(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise errors.InputError(f"expected a JSON object, not {quote(value)}")
    return value


def check_no_media(fields: Mapping[str, Any], where: str = "") -> None:
    """Checks that a line or message has no images, videos or sounds, which are not supported."""
    for name in _MEDIA:
        if fields.get(name) not in EMPTY:
            raise errors.InputError(f"{where}{name}: not supported, only texts; remove the field")


def _check_parts(content: Any, where: str) -> None:
    """Raises InputError if a content is a list with other parts than texts."""
    for place, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (None, "text", "refusal"):
            raise errors.InputError(f"{where}[{place}]: {quote(kind)} is not supported, only texts")


def check_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a line that are variables of chat templates, such as tools."""
    variables = {name: fields[name] for name in _VARIABLES if fields.get(name) not in EMPTY}
    for name, value in variables.items():
        if not isinstance(value, list):
            raise errors.InputError(f"{name}: expected a list, not {quote(value)}")
        check_unicode(json.dumps(value, ensure_ascii=False), name)
    return variables


def check_ids(value: Any, what: str = "prompt_ids") -> tuple[int, ...]:
    """Checks that a field is a non-empty list of token ids; errors name the field `what`."""
    if not isinstance(value, list):
        raise errors.InputError(f"{what}: expected a list, not {quote(value)}")
    if not value:
        raise errors.InputError(f"empty {what.removesuffix('_ids')}: no {what}")
    for place, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool):
            raise errors.InputError(f"{what}[{place}]: expected an integer, not {quote(item)}")
    return tuple(value)


def quote(value: Any) -> str:
    """Returns the beginning of a value as JSON."""
    text = ""
    for piece in json.JSONEncoder(default=repr).iterencode(value):
        text += piece
        if len(text) > MAX_QUOTED_CHARACTERS:
            return f"{text[:MAX_QUOTED_CHARACTERS]}…"
    return text


def summarize(name: str, problems: Sequence[str], what: str = "prompts") -> str:
    """Joins problems, one per line; those after the first ten are only counted."""
    lines = list(problems[:MAX_PROBLEMS_SHOWN])
    if len(problems) > len(lines):
        more = len(problems) - len(lines)
        lines.append(f"{name}: {more} more unusable {what} ({len(problems)} in all)")
    return "\n".join(lines)
