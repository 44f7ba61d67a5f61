"""Reads the prompts of a run: from the config, a JSONL file, or standard input."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from dflash import errors
from dflash.common import tokenizer as tokenizer_lib
from dflash.config import schema

KINDS = ("prompt", "messages", "prompt_ids")
MAX_PROBLEMS_SHOWN = 10
MAX_QUOTED_CHARACTERS = 60


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and what they were made from (nothing, when it came as ids)."""

    index: int  # place in the run, from 0
    ids: tuple[int, ...]
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    source: str = ""  # where it was read, for later complaints, such as "prompts.jsonl:7"


def read_prompts(
    config: schema.PromptsConfig,
    tokenizer: tokenizer_lib.Tokenizer | None,
    *,
    vocab_size: int,
    stdin: TextIO,
) -> list[Prompt]:
    """Reads and tokenizes every prompt of a run.

    Prompts come from `config.text`, else `config.file`, else `stdin`. A line of the file holds
    exactly one of `prompt`, `messages` and `prompt_ids`; its further keys are left alone, for real
    data sets carry ids and answers. A line of `stdin` is a prompt. Blank lines are skipped.

    Args:
      config: where to read, and whether plain text goes through the chat template.
      tokenizer: None will do where every prompt is given as token ids.
      vocab_size: every token id must be smaller.
      stdin: read to its end, and only where the config names no prompts.

    Raises:
      InputError: there are no prompts, or some are unusable: the first ten of these are named, one
        line each, and the rest counted.
    """
    if config.text and config.file:
        raise errors.InputError("prompts.text and prompts.file are both given: keep one of them")
    if config.text:
        name, entries = "prompts.text", _text_entries(config.text)
    elif config.file:
        name, entries = config.file, _file_entries(config.file)
    else:
        name, entries = "stdin", _stdin_entries(stdin)
    prompts: list[Prompt] = []
    problems: list[str] = []
    for source, read in entries:
        try:
            prompt = _make_prompt(read(), tokenizer, chat=config.chat, vocab_size=vocab_size)
        except errors.InputError as error:
            problems.append(f"{source}: {error}")
        else:
            prompts.append(dataclasses.replace(prompt, index=len(prompts), source=source))
    if problems:
        raise errors.InputError(_summarize(name, problems))
    if not prompts:
        raise errors.InputError(f"{name}: no prompts in it")
    return prompts


# An entry is where a prompt stands, and a call that reads it as the fields of a JSONL line. Reading
# waits for the call, so that one bad line does not hide the next.
_Entries = Iterator[tuple[str, Any]]


def _text_entries(texts: Iterable[str]) -> _Entries:
    for index, text in enumerate(texts):
        yield f"prompts.text[{index}]", lambda text=text: {"prompt": text}


def _file_entries(file: str) -> _Entries:
    try:
        with pathlib.Path(file).expanduser().open("rb") as lines:
            for number, line in _numbered_lines(lines):
                yield f"{file}:{number}", lambda line=line: _parse_json(_decode(line))
    except OSError as error:
        raise errors.InputError(f"{file}: cannot be read: {error.strerror or error}") from error


def _stdin_entries(stdin: TextIO) -> _Entries:
    if stdin.isatty():
        print("reading prompts, one a line; Ctrl-D ends them", file=sys.stderr)
    # Bytes where there are any: decoding line by line lets a complaint name the line.
    lines = getattr(stdin, "buffer", None) or (line.encode("utf-8") for line in stdin)
    for number, line in _numbered_lines(lines):
        yield f"stdin:{number}", lambda line=line: {"prompt": _decode(line)}


def _numbered_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, without their ends, each with its number from 1."""
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # some editors begin UTF-8 files with a mark
        if line.strip():
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise errors.InputError(message) from error


def _parse_json(line: str) -> Mapping[str, Any]:
    """Reads one line of a JSONL file as an object.

    Raises:
      InputError: the line is something else.
    """
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise errors.InputError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; deep nesting
        raise errors.InputError(f"not usable JSON: {error}") from error
    if not isinstance(fields, dict):
        raise errors.InputError(f"expected a JSON object, not {_quote(fields)}")
    return fields


def _make_prompt(
    fields: Mapping[str, Any],
    tokenizer: tokenizer_lib.Tokenizer | None,
    *,
    chat: bool,
    vocab_size: int,
) -> Prompt:
    """Checks and tokenizes one entry; its index and source are for the caller to fill in.

    Raises:
      InputError: the entry is unusable.
    """
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        found = " and ".join(kinds) if kinds else "none of them"
        raise errors.InputError(f"expected exactly one of {', '.join(KINDS)}; found {found}")
    value = fields[kinds[0]]
    if "prompt_ids" in fields:
        ids = _check_prompt_ids(value)
        _check_vocabulary(ids, vocab_size, "token id")
        return Prompt(0, ids)
    text = _check_text(value) if "prompt" in fields else None
    messages = _check_messages(value) if "messages" in fields else None
    if tokenizer is None:
        raise errors.InputError("text needs a tokenizer and the target has none: give prompt_ids")
    if messages is not None:
        ids = tuple(tokenizer.encode_chat(messages))
    elif chat:
        ids = tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
    else:
        ids = tuple(tokenizer.encode(text))
    if not ids:
        raise errors.InputError("empty prompt: the text has no tokens")
    _check_vocabulary(ids, vocab_size, "the tokenizer does not fit the target: token id")
    return Prompt(0, ids, text, messages)


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise errors.InputError(f"prompt: expected a string, not {_quote(value)}")
    if not value:
        raise errors.InputError("empty prompt")
    return _check_unicode(value, "prompt")


def _check_unicode(text: str, where: str) -> str:
    """Rejects half surrogate pairs: JSON can spell them, but no tokenizer or file takes them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise errors.InputError(f"{where}: {code} is half a character") from error
    return text


def _check_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise errors.InputError(f"messages: expected a list, not {_quote(value)}")
    if not value:
        raise errors.InputError("empty prompt: no messages")
    for place, message in enumerate(value):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise errors.InputError(f"{where}: expected an object, not {_quote(message)}")
        for key in ("role", "content"):
            if key not in message:
                raise errors.InputError(f"{where}: no {key}")
            if not isinstance(message[key], str):
                quoted = _quote(message[key])
                raise errors.InputError(f"{where}.{key}: expected a string, not {quoted}")
            _check_unicode(message[key], f"{where}.{key}")
    return tuple(value)


def _check_prompt_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise errors.InputError(f"prompt_ids: expected a list, not {_quote(value)}")
    if not value:
        raise errors.InputError("empty prompt: no prompt_ids")
    for place, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool):
            raise errors.InputError(f"prompt_ids[{place}]: expected an integer, not {_quote(item)}")
    return tuple(value)


def _check_vocabulary(ids: Sequence[int], vocab_size: int, what: str) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise errors.InputError(
                f"{what} {token} (position {place}) is out of the vocabulary (size {vocab_size})"
            )


def _quote(value: Any) -> str:
    text = json.dumps(value)
    if len(text) > MAX_QUOTED_CHARACTERS:
        return f"{text[:MAX_QUOTED_CHARACTERS]}…"
    return text


def _summarize(name: str, problems: Sequence[str]) -> str:
    """Joins problems, one a line; those beyond the first ten are only counted."""
    lines = list(problems[:MAX_PROBLEMS_SHOWN])
    if len(problems) > len(lines):
        more = len(problems) - len(lines)
        lines.append(f"{name}: {more} more unusable prompts ({len(problems)} in all)")
    return "\n".join(lines)
