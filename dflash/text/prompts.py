"""Prompts of a run, from the config, a JSONL file, a data set, standard input, or a program."""

import contextlib
import dataclasses
import functools
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

# Prompt of a program: a text, token ids, or the messages of a conversation.
Value = str | Iterable[int] | Iterable[Mapping[str, Any]]
# An entry is the place of a prompt and a function that reads it as the fields of a JSONL line. Only
# the call of the function reads it, so that all bad lines can be reported.
_Entries = Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokenized prompt.

    Attributes:
      index: Index in the run, from 0. Later turns have the indices after it, so the index of the
        next prompt is index + 1 + len(later_turns).
      source: Place for error messages, such as "prompts.jsonl:7".
      later_turns: Further messages of the user, each of which follows an answer of the model.
      dropped_answer: The line of a file ended with a reference answer, which is not a part of the
        prompt.
      variables: Variables of the chat template, such as "tools".
    """

    index: int
    ids: tuple[int, ...]
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    source: str = ""
    later_turns: tuple[str, ...] = ()
    dropped_answer: bool = False
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def indices(self) -> range:
        """Index of the prompt and those of its later turns."""
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

    Prompts come from `config.text`, `config.file` or `config.dataset`, otherwise from `stdin`. A
    line of the file has exactly one of the keys `prompt`, `messages`, `turns` (messages of the
    user, each answered by the model) and `prompt_ids`. `tools` and `documents` are variables of the
    chat template. Images, videos and sounds are rejected. Other keys are ignored, since data sets
    often have ids and answers. Messages of the assistant at the end of a conversation are dropped,
    since they answer the question that the prompt asks. Each line of `stdin` is a prompt. Blank
    lines are skipped.

    Args:
      config: Source of the prompts, and whether the chat template is applied to plain text.
      tokenizer: Tokenizer of the target; may be None if all prompts are token ids.
      stdin: Stream that is read to its end if the config names no prompts.
      conversations: Messages before the first answer of each example of `config.dataset`.
      later_turns: Further messages of the user in each conversation; empty for none.
    Raises:
      InputError: There are no prompts, or some are unusable. The message lists the first ten of
        these, one per line, and counts the others.
    """
    if config.text and config.file:
        raise errors.InputError("prompts.text and prompts.file are both given: keep one of them")
    if config.text:
        name = "prompts.text"
        entries = (
            (f"{name}[{index}]", functools.partial(_fields, text))
            for index, text in enumerate(config.text)
        )
    elif config.file:
        name, entries = config.file, jsonl.entries(config.file)
    elif config.dataset:
        name = f"{config.dataset}/test"
        entries = _conversation_entries(name, conversations, later_turns)
    else:
        name, entries = "stdin", _stdin_entries(stdin)
    entries = itertools.islice(entries, config.limit)
    drop_answers = config.file is not None
    return _collect(name, entries, config, tokenizer, vocab_size, drop_answers=drop_answers)


def from_values(
    values: Iterable[Value],
    config: schema.PromptsConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    vocab_size: int,
) -> list[Prompt]:
    """Tokenizes prompts that a program passes as Python values."""
    entries = (
        (f"prompts[{index}]", functools.partial(_fields, value))
        for index, value in enumerate(values)
    )
    return _collect("prompts", entries, config, tokenizer, vocab_size)


def _collect(
    name: str,
    entries: _Entries,
    config: schema.PromptsConfig,
    tokenizer: tokenizer_lib.Tokenizer | None,
    vocab_size: int,
    *,
    drop_answers: bool = False,
) -> list[Prompt]:
    """Tokenizes all entries; raises like `read_prompts`."""
    prompts: list[Prompt] = []
    problems: list[str] = []
    for source, read in entries:
        try:
            prompt = _make_prompt(read(), config, tokenizer, vocab_size, drop_answer=drop_answers)
        except errors.InputError as error:
            problems.append(f"{source}: {error}")
        else:
            index = prompts[-1].indices.stop if prompts else 0
            prompts.append(dataclasses.replace(prompt, index=index, source=source))
    if problems:
        raise errors.InputError(jsonl.summarize(name, problems))
    if not prompts:
        raise errors.InputError(f"{name}: no prompts found")
    return prompts


def read_first(
    config: schema.PromptsConfig, tokenizer: tokenizer_lib.Tokenizer, *, vocab_size: int
) -> Prompt | None:
    """Returns the first prompt of `config.file` that can be read; None without any."""
    for _, read in jsonl.entries(config.file):
        with contextlib.suppress(errors.InputError):
            return _make_prompt(read(), config, tokenizer, vocab_size, drop_answer=True)
    return None


def dropped_answers(prompts: Sequence[Prompt]) -> list[str]:
    """Returns a line that counts the reference answers that were dropped; empty for none."""
    count = sum(prompt.dropped_answer for prompt in prompts)
    return [f"prompts      reference answers at the end of {count} are dropped"] if count else []


def ends_with_answer(fields: Mapping[str, Any]) -> bool:
    """Returns whether the messages of a JSONL line end with one of the assistant."""
    messages = jsonl.check_messages(fields["messages"]) if "messages" in fields else []
    return bool(messages) and messages[-1]["role"] == "assistant"


def in_chat(chat: bool | None, tokenizer: tokenizer_lib.Tokenizer) -> bool:
    """Returns whether texts go through the chat template; None asks for it if there is one."""
    return tokenizer.has_chat_template if chat is None else chat


def continued(
    prompt: Prompt,
    turn: int,
    so_far: Sequence[Mapping[str, Any]],
    answer: str,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    vocab_size: int,
) -> Prompt:
    """Returns the prompt of a later turn: the conversation with its answer and the next message.

    As in published evaluations, the chat template renders the answer as text, which may differ from
    the decoded tokens (the template of Qwen3 omits earlier reasoning).

    Args:
      turn: Number of the later turn; 1 after the first answer.
      so_far: Messages before the answer.
    """
    # Decoded tokens may contain lone surrogates, which no tokenizer accepts.
    answer = answer.encode("utf-8", "replace").decode("utf-8")
    reply = {"role": "assistant", "content": answer}
    messages = (*so_far, reply, {"role": "user", "content": prompt.later_turns[turn - 1]})
    source = f"{prompt.source}, turn {turn + 1}"
    try:
        fields = {**prompt.variables, "messages": list(messages)}
        later = _make_prompt(fields, schema.PromptsConfig(), tokenizer, vocab_size)
    except errors.InputError as error:
        raise errors.InputError(f"{source}: {error}") from error
    return dataclasses.replace(later, index=prompt.index + turn, source=source)


def _fields(value: Value) -> Mapping[str, Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return {"prompt": value}
    items = [value] if isinstance(value, Mapping) else list(value)
    if items and isinstance(items[0], Mapping):
        return {"messages": [dict(item) if isinstance(item, Mapping) else item for item in items]}
    # Integers of arrays have other types than int.
    return {"prompt_ids": [int(id) if isinstance(id, numbers.Integral) else id for id in items]}


def _conversation_entries(
    name: str, conversations: Iterable[Messages], later_turns: Iterable[Sequence[str]]
) -> _Entries:
    pairs = itertools.zip_longest(conversations, later_turns, fillvalue=())
    for index, (messages, later) in enumerate(pairs):
        fields = {"messages": list(messages), jsonl.LATER_TURNS: tuple(later)}
        yield f"{name}[{index}]", lambda fields=fields: fields


def _stdin_entries(stdin: TextIO) -> _Entries:
    if stdin.isatty():
        print("reading prompts, one per line; press Ctrl-D to finish", file=sys.stderr)
    # Read bytes if possible, because an error of decoding by line can name the line.
    lines = getattr(stdin, "buffer", None) or io.BytesIO(stdin.read().encode("utf-8"))
    for place, line in jsonl.placed_lines(lines, "stdin"):
        yield place, lambda line=line: {"prompt": jsonl.decode(line)}


def _make_prompt(
    fields: Mapping[str, Any],
    config: schema.PromptsConfig,
    tokenizer: tokenizer_lib.Tokenizer | None,
    vocab_size: int,
    *,
    drop_answer: bool = False,
) -> Prompt:
    """Checks and tokenizes an entry; the caller sets index and source."""
    line = jsonl.check_prompt(fields)
    if line.ids is not None:
        _check_vocabulary(line.ids, vocab_size, "token id")
        return Prompt(0, line.ids)
    if tokenizer is None:
        raise errors.InputError("text needs a tokenizer and the target has none: give prompt_ids")
    messages = _without_answer(line.messages) if drop_answer and line.messages else line.messages
    if messages is not None:
        ids = _encode_chat(messages, line.variables, tokenizer)
    elif in_chat(config.chat, tokenizer):
        ids = _encode_chat([{"role": "user", "content": line.text}], line.variables, tokenizer)
    elif line.variables:
        field = next(iter(line.variables))
        raise errors.InputError(f"{field}: only chat templates render this field")
    else:
        ids = tuple(tokenizer.encode(line.text, special_tokens=config.special_tokens))
    if not ids:
        raise errors.InputError("empty prompt: the text has no tokens")
    _check_vocabulary(ids, vocab_size, "the tokenizer does not fit the target: token id")
    return Prompt(
        *(0, ids, line.text, messages),
        later_turns=line.later_turns,
        dropped_answer=messages != line.messages,
        variables=line.variables,
    )


def _encode_chat(
    messages: Messages, variables: Mapping[str, Any], tokenizer: tokenizer_lib.Tokenizer
) -> tuple[int, ...]:
    """Encodes a conversation; raises InputError if the chat template ignores a variable."""
    ids = tokenizer.encode_chat(messages, **variables)
    for name in variables:
        remaining = {key: value for key, value in variables.items() if key != name}
        try:
            without = tokenizer.encode_chat(messages, **remaining)
        except errors.InputError:
            continue  # the template needs the variable
        if without == ids:
            raise errors.InputError(f"{name}: the chat template does not render this field")
    return tuple(ids)


def _without_answer(messages: Messages) -> tuple[Mapping[str, Any], ...]:
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise errors.InputError("messages: expected a question, not answers alone")
    return tuple(messages[:end])


def _check_vocabulary(ids: Sequence[int], vocab_size: int, what: str) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise errors.InputError(
                f"{what} {token} (position {place}) is out of the vocabulary (size {vocab_size})"
            )
