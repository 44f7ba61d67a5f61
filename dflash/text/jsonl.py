"""JSONL files: reading lines, checking their fields, and error messages about them."""

import codecs
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from dflash import errors
from dflash.config import encoding, schema
from dflash.storage import paths

MAX_DEPTH = 100  # of nested values
# Each token of a sequence takes a byte at least, so a longer line is no prompt that could be used.
MAX_LINE_BYTES = schema.MAX_TOKENS
MAX_PROBLEMS_SHOWN = 10
MAX_QUOTED_CHARACTERS = 60


def entries(file: str) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yields each line's place, such as "a.jsonl:7", and a call that reads it as an object.

    Reading waits for the call, so that one bad line does not hide the next.

    Raises:
      InputError: the file cannot be read; or by the call: the line is no JSON object.
    """
    try:
        with paths.to_path(file).open("rb") as lines:
            for place, line in placed_lines(lines, file):
                yield place, lambda line=line: parse_json(decode(line))
    except (OSError, ValueError) as error:  # no file has a name with a null character
        reason = getattr(error, "strerror", None) or error
        raise errors.InputError(f"{file}: cannot be read: {reason}") from error


def placed_lines(lines: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yields the lines that are not blank, without their ends, each with its place.

    Args:
      lines: a stream of bytes.
      name: of the stream, in places such as "a.jsonl:7".
    Raises:
      InputError: the text is not UTF-8 by its beginning, or a line is far too long.
    """
    for number in itertools.count(1):
        line = lines.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise errors.InputError(
                f"{name}:{number}: longer than {MAX_LINE_BYTES:,} bytes; is it JSON with one "
                "object a line?"
            )
        if number == 1:
            try:
                encoding.check(line)
            except errors.InputError as error:
                raise errors.InputError(f"{name}: {error}") from error
            line = line.removeprefix(codecs.BOM_UTF8)  # some editors begin files with this mark
        if line.strip():
            yield f"{name}:{number}", line.removesuffix(b"\n").removesuffix(b"\r")


def decode(line: bytes) -> str:
    """A line as text; InputError says where it is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise errors.InputError(message) from error


def parse_json(line: str) -> Mapping[str, Any]:
    """Reads one line of a JSONL file as an object.

    Raises:
      InputError: the line is something else, nested too deep, or has numbers that JSON has not.
    """
    try:
        fields = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except _NotFinite as error:
        raise errors.InputError(
            f"{_place_of_not_finite(line)}: {error} is no number in JSON"
        ) from error
    except json.JSONDecodeError as error:
        raise errors.InputError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; deep nesting
        raise errors.InputError(f"not usable JSON: {error}") from error
    if not isinstance(fields, dict):
        raise errors.InputError(f"expected a JSON object, not {quote(fields)}")
    if line.count("[") + line.count("{") > MAX_DEPTH:  # there are many of them in text, too
        deep = next((place for place, depth, _ in _walk(fields) if depth > MAX_DEPTH), None)
        if deep is not None:
            raise errors.InputError(f"{deep[:MAX_QUOTED_CHARACTERS]}…: nested too deep")
    return fields


class _NotFinite(Exception):
    """A number such as NaN, which Python's JSON has and others refuse."""


def _refuse(constant: str) -> float:
    raise _NotFinite(constant)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _NotFinite(digits[:MAX_QUOTED_CHARACTERS])
    return number


def _place_of_not_finite(line: str) -> str:
    found = (
        place
        for place, _, value in _walk(json.loads(line))
        if isinstance(value, float) and not math.isfinite(value)
    )
    return next(found)


def _walk(value: Any) -> Iterator[tuple[str, int, Any]]:
    """Yields every value within a JSON value, its place such as "messages[0].role", its depth."""
    waiting = [("", 0, value)]
    while waiting:
        place, depth, value = waiting.pop()
        yield place, depth, value
        if isinstance(value, dict):
            inner = [(f"{place}.{key}" if place else key, one) for key, one in value.items()]
        elif isinstance(value, list):
            inner = [(f"{place}[{index}]", one) for index, one in enumerate(value)]
        else:
            continue
        waiting += [(where, depth + 1, one) for where, one in reversed(inner)]


def check_text(value: Any, what: str = "prompt") -> str:
    """A field as text that is not empty; `what` names the field in errors."""
    if not isinstance(value, str):
        raise errors.InputError(f"{what}: expected a string, not {quote(value)}")
    if not value:
        raise errors.InputError(f"empty {what}")
    return check_unicode(value, what)


def check_unicode(text: str, where: str) -> str:
    """Rejects unpaired surrogates: JSON can spell them, but no tokenizer or file takes them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise errors.InputError(f"{where}: {code} is half a character") from error
    return text


def check_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    """A field as messages, at least one, each with a role and a content."""
    if not isinstance(value, list):
        raise errors.InputError(f"messages: expected a list, not {quote(value)}")
    if not value:
        raise errors.InputError("empty prompt: no messages")
    for place, message in enumerate(value):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise errors.InputError(f"{where}: expected an object, not {quote(message)}")
        for key in ("role", "content"):
            if key not in message:
                raise errors.InputError(f"{where}: no {key}")
            if not isinstance(message[key], str):
                quoted = quote(message[key])
                raise errors.InputError(f"{where}.{key}: expected a string, not {quoted}")
            check_unicode(message[key], f"{where}.{key}")
    return tuple(value)


def check_ids(value: Any, what: str = "prompt_ids") -> tuple[int, ...]:
    """A field as token ids, at least one; `what` names the field in errors."""
    if not isinstance(value, list):
        raise errors.InputError(f"{what}: expected a list, not {quote(value)}")
    if not value:
        raise errors.InputError(f"empty {what.removesuffix('_ids')}: no {what}")
    for place, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool):
            raise errors.InputError(f"{what}[{place}]: expected an integer, not {quote(item)}")
    return tuple(value)


def quote(value: Any) -> str:
    """The beginning of a value as JSON."""
    text = json.dumps(value, default=repr)
    if len(text) > MAX_QUOTED_CHARACTERS:
        return f"{text[:MAX_QUOTED_CHARACTERS]}…"
    return text


def summarize(name: str, problems: Sequence[str], what: str = "prompts") -> str:
    """Joins problems, one a line; those beyond the first ten are only counted."""
    lines = list(problems[:MAX_PROBLEMS_SHOWN])
    if len(problems) > len(lines):
        more = len(problems) - len(lines)
        lines.append(f"{name}: {more} more unusable {what} ({len(problems)} in all)")
    return "\n".join(lines)
