"""Reads the prompts of a run: from the config, a JSONL file, or standard input."""

import dataclasses
import io
import itertools
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from dflash import errors
from dflash.config import schema
from dflash.text import jsonl
from dflash.text import tokenizer as tokenizer_lib
from dflash.text.chat_template import Messages

_LATER_TURNS = "later turns"  # among the fields of an entry; no name that a file would have
KINDS = ("prompt", "messages", "turns", "prompt_ids")
# A prompt as a program gives it: a text, token ids, or the messages of a conversation.
Value = str | Iterable[int] | Iterable[Mapping[str, Any]]
# An entry is the place of a prompt, and a call that reads it as the fields of a JSONL line. Reading
# waits for the call, so that one bad line does not hide the next.
_Entries = Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and what they were made from (nothing, when it came as ids).

    `later_turns` are the user's later messages, each after an answer of the model's. Their indices
    follow this one's, so the next prompt's index is index + 1 + len(later_turns).
    """

    index: int  # place in the run, from 0
    ids: tuple[int, ...]
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    source: str = ""  # where it was read, for later error messages, such as "prompts.jsonl:7"
    later_turns: tuple[str, ...] = ()

    @property
    def indices(self) -> range:
        """Its own index and those of its later turns."""
        return range(self.index, self.index + 1 + len(self.later_turns))


def read_prompts(
    config: schema.PromptsConfig,
    tokenizer: tokenizer_lib.Tokenizer | None,
    *,
    vocab_size: int,
    stdin: TextIO,
    conversations: Sequence[Messages] = (),
    later_turns: Sequence[Sequence[str]] = (),
) -> list[Prompt]:
    """Reads and tokenizes every prompt of a run.

    Prompts come from `config.text`, `config.file` or `config.dataset`, else `stdin`. A line of the
    file holds exactly one of `prompt`, `messages`, `turns` (of the user, the model answers each)
    and `prompt_ids`; other keys are ignored: real data sets carry ids and answers. A
    line of `stdin` is a prompt. Blank lines are skipped.

    Args:
      config: where to read, and whether plain text goes through the chat template.
      tokenizer: may be None where every prompt is given as token ids.
      vocab_size: every token id must be smaller.
      stdin: read to its end, and only where the config names no prompts.
      conversations: the openings of `config.dataset`'s examples.
      later_turns: the user's later messages of each conversation; empty for none.

    Raises:
      InputError: there are no prompts, or some are unusable: the first ten of these are named, one
        line each, and the rest counted.
    """
    if config.text and config.file:
        raise errors.InputError("prompts.text and prompts.file are both given: keep one of them")
    if config.text:
        name, entries = "prompts.text", _text_entries(config.text)
    elif config.file:
        name, entries = config.file, jsonl.entries(config.file)
    elif config.dataset:
        name = f"{config.dataset}/{config.split}"
        entries = _conversation_entries(name, conversations, later_turns)
    else:
        name, entries = "stdin", _stdin_entries(stdin)
    return _collect(name, entries, config, tokenizer, vocab_size)


def from_values(
    values: Iterable[Value],
    config: schema.PromptsConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    vocab_size: int,
) -> list[Prompt]:
    """Tokenizes prompts that a program gives, rather than a file.

    Args:
      values: each a text, token ids, or the messages of a conversation.
      config: whether plain text goes through the chat template.
      tokenizer: the target's.
      vocab_size: every token id must be smaller.
    Raises:
      InputError: as `read_prompts`.
    """
    return _collect("prompts", _value_entries(values), config, tokenizer, vocab_size)


def _collect(
    name: str,
    entries: _Entries,
    config: schema.PromptsConfig,
    tokenizer: tokenizer_lib.Tokenizer | None,
    vocab_size: int,
) -> list[Prompt]:
    """Makes the prompts of all entries.

    Raises:
      InputError: see `read_prompts`.
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    for source, read in entries:
        try:
            prompt = _make_prompt(
                read(),
                tokenizer,
                chat=config.chat,
                special_tokens=config.special_tokens,
                vocab_size=vocab_size,
            )
        except errors.InputError as error:
            problems.append(f"{source}: {error}")
        else:
            index = prompts[-1].indices.stop if prompts else 0
            prompts.append(dataclasses.replace(prompt, index=index, source=source))
    if problems:
        raise errors.InputError(jsonl.summarize(name, problems))
    if not prompts:
        raise errors.InputError(f"{name}: no prompts in it")
    return prompts


def continued(
    prompt: Prompt,
    turn: int,
    so_far: Sequence[Mapping[str, Any]],
    answer: str,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    vocab_size: int,
) -> Prompt:
    """The prompt of a later turn: the conversation so far, the model's answer, and the user's text.

    As in published evaluations, the answer goes through the chat template as text, which may render
    it otherwise than it was written (Qwen3's leaves out earlier reasoning).

    Args:
      prompt: prompt of the first turn.
      turn: number of the later turn; 1 after the first answer.
      so_far: the messages before the answer.
      answer: the model's answer.
      tokenizer: a tokenizer with a chat template.
      vocab_size: every token id must be smaller.
    Raises:
      InputError: the template refuses the conversation.
    """
    # Odd tokens can spell half a character, which no tokenizer takes.
    answer = answer.encode("utf-8", "replace").decode("utf-8")
    said = {"role": "assistant", "content": answer}
    messages = (*so_far, said, {"role": "user", "content": prompt.later_turns[turn - 1]})
    source = f"{prompt.source}, turn {turn + 1}"
    try:
        found = _make_prompt({"messages": list(messages)}, tokenizer, vocab_size=vocab_size)
    except errors.InputError as error:
        raise errors.InputError(f"{source}: {error}") from error
    return dataclasses.replace(found, index=prompt.index + turn, source=source)


def _value_entries(values: Iterable[Value]) -> _Entries:
    for index, value in enumerate(values):
        yield f"prompts[{index}]", lambda value=value: _fields(value)


def _fields(value: Value) -> Mapping[str, Any]:
    """A prompt of a program as the fields of a JSONL line."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return {"prompt": value}
    items = [value] if isinstance(value, Mapping) else list(value)
    if items and isinstance(items[0], Mapping):
        return {"messages": [dict(one) if isinstance(one, Mapping) else one for one in items]}
    # Arrays hold integers of other types than Python's.
    return {"prompt_ids": [int(id) if isinstance(id, numbers.Integral) else id for id in items]}


def _text_entries(texts: Iterable[str]) -> _Entries:
    for index, text in enumerate(texts):
        yield f"prompts.text[{index}]", lambda text=text: {"prompt": text}


def _conversation_entries(
    name: str, conversations: Iterable[Messages], later_turns: Iterable[Sequence[str]]
) -> _Entries:
    pairs = itertools.zip_longest(conversations, later_turns, fillvalue=())
    for index, (messages, later) in enumerate(pairs):
        fields = {"messages": list(messages), _LATER_TURNS: tuple(later)}
        yield f"{name}[{index}]", lambda fields=fields: fields


def _stdin_entries(stdin: TextIO) -> _Entries:
    if stdin.isatty():
        print("reading prompts, one a line; Ctrl-D ends them", file=sys.stderr)
    # Bytes where there are any: decoding line by line lets an error name the line.
    lines = getattr(stdin, "buffer", None) or io.BytesIO(stdin.read().encode("utf-8"))
    for place, line in jsonl.placed_lines(lines, "stdin"):
        yield place, lambda line=line: {"prompt": jsonl.decode(line)}


def _make_prompt(
    fields: Mapping[str, Any],
    tokenizer: tokenizer_lib.Tokenizer | None,
    *,
    chat: bool = False,
    special_tokens: bool = False,
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
        ids = jsonl.check_ids(value)
        _check_vocabulary(ids, vocab_size, "token id")
        return Prompt(0, ids)
    text = jsonl.check_text(value) if "prompt" in fields else None
    messages = jsonl.check_messages(value) if "messages" in fields else None
    later_turns = fields.get(_LATER_TURNS, ())
    if "turns" in fields:
        first, *later_turns = _check_turns(value)
        messages = ({"role": "user", "content": first},)
    if tokenizer is None:
        raise errors.InputError("text needs a tokenizer and the target has none: give prompt_ids")
    if messages is not None:
        ids = tuple(tokenizer.encode_chat(messages))
    elif chat:
        ids = tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
    else:
        ids = tuple(tokenizer.encode(text, special_tokens=special_tokens))
    if not ids:
        raise errors.InputError("empty prompt: the text has no tokens")
    _check_vocabulary(ids, vocab_size, "the tokenizer does not fit the target: token id")
    return Prompt(0, ids, text, messages, later_turns=tuple(later_turns))


def _check_turns(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise errors.InputError(f"turns: expected a list of texts, not {jsonl.quote(value)}")
    return [jsonl.check_text(turn, f"turns[{place}]") for place, turn in enumerate(value)]


def _check_vocabulary(ids: Sequence[int], vocab_size: int, what: str) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise errors.InputError(
                f"{what} {token} (position {place}) is out of the vocabulary (size {vocab_size})"
            )
