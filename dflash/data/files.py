"""Data set `jsonl`: the user's own conversations, one JSON object per line.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "response": "…"}            one question and its answer
    {"prompt_ids": [1, 2], "output_ids": [3]}   token ids, as in outputs.jsonl of a decode run

A hash of the messages before the first answer determines the split, so two answers to one question,
and all turns of a conversation, are always in the same split.

Messages may have further fields, such as "tool_calls" or "reasoning_content", and lines "tools",
if the chat template renders them. "weight": 0 keeps an answer as context that is not learned.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.data.example import Example, Split, pair, split_of
from dflash.storage import paths
from dflash.text import jsonl

TASK = "jsonl"
ASSISTANT = "assistant"
# Fields that belong into messages; others of a line, such as ids, are ignored.
_UNREAD = (
    *("system", "system_prompt", "history", "weight", "tool_calls", "functions"),
    *("reasoning_content", "reasoning", "thinking", "chat_template_kwargs"),
)
_KINDS = "messages, prompt and response, or prompt_ids and output_ids"


def examples(files: Sequence[str], split: Split, held_out_percent: float) -> Iterator[Example]:
    """Yields the examples of a split in the order of the files and their lines.

    Args:
      held_out_percent: Percentage of the questions in validation, and the same again in test.
    """
    for file in files:
        for example in read_examples(file, jsonl.entries(file)):
            if split_of(example.source, held_out_percent) == split:
                yield example


def read_examples(
    name: str, entries: Iterable[tuple[str, Callable[[], Mapping[str, Any]]]], task: str = TASK
) -> Iterator[Example]:
    """Yields the examples of lines; after an unusable one, the others are only checked.

    Args:
      entries: Place of each line, and a function that returns its fields.
    Raises:
      InputError: There are no lines, or some are unusable. The message lists the first ten of these
        and counts the others.
    """
    problems: list[str] = []
    empty = True
    for place, read in entries:
        empty = False
        try:
            example = dataclasses.replace(example_of(read(), task), place=place)
        except errors.InputError as error:
            problems.append(f"{place}: {error}")
        else:
            if not problems:
                yield example
    if problems:
        raise errors.InputError(jsonl.summarize(name, problems, "lines"))
    if empty:
        raise errors.InputError(f"{name}: contains no conversations")


def content_hash(file: str) -> bytes:
    """Returns the SHA-256 digest of a file."""
    try:
        with paths.to_path(file).open("rb") as content:
            return hashlib.file_digest(content, "sha256").digest()
    except OSError as error:
        raise errors.InputError(f"{file}: cannot be read: {error.strerror or error}") from error


def example_of(fields: Mapping[str, Any], task: str = TASK) -> Example:
    """Builds the example of a line of the data set `task`."""
    if "output_ids" in fields:
        prompt = jsonl.check_ids(fields.get("prompt_ids"))
        output = jsonl.check_ids(fields["output_ids"], "output_ids")
        invalid = [token for token in (*prompt, *output) if not 0 <= token < 2**31]
        if invalid:
            raise errors.InputError(f"token id {invalid[0]} is not in the range 0 to 2**31 - 1")
        return Example(task, _source_of_ids(fields, prompt), prompt_ids=prompt, output_ids=output)
    jsonl.check_no_media(fields)
    for name in _UNREAD:
        if fields.get(name) not in jsonl.EMPTY:
            raise errors.InputError(f"{name}: is not read here; put it into messages, or remove it")
    if "messages" in fields:
        return _conversation(fields, task)
    if "prompt" in fields and "response" in fields:
        prompt = jsonl.check_text(fields["prompt"])
        response = jsonl.check_text(fields["response"], "response")
        if not response.strip():
            raise errors.InputError("empty response")
        question = {"role": "user", "content": prompt}
        return pair(task, _source([question]), prompt, response)
    keys = ", ".join(map(repr, list(fields)[:5])) or "nothing"
    raise errors.InputError(f"expected {_KINDS}; found {keys}")


def _conversation(fields: Mapping[str, Any], task: str) -> Example:
    messages = [dict(message) for message in jsonl.check_messages(fields["messages"])]
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise errors.InputError("messages: expected a question, and an answer at the end")
    variables = jsonl.check_variables(fields)
    answers = _answers(messages)
    context_only = [place for place in answers if messages[place].get("weight", 1) == 0]
    if context_only == answers:
        raise errors.InputError("messages: no answer to learn: all have weight 0")
    for place, message in enumerate(messages):
        _check_weight(message.pop("weight", None), place in answers, f"messages[{place}]")
        empty = not message["content"].strip() and message.keys() <= jsonl.PLAIN_FIELDS
        if empty and place in answers and place not in context_only:
            raise errors.InputError(
                f'messages[{place}]: the answer is empty: remove it, or give it "weight": 0 to '
                "keep it as context"
            )
    return Example(
        task,
        _source(messages),
        tuple(messages),
        context_only=tuple(context_only),
        variables=variables,
    )


def _check_weight(weight: Any, is_answer: bool, where: str) -> None:
    allowed = (None, 0, 1) if is_answer else (None, 0)
    if isinstance(weight, list | dict) or weight not in allowed:
        shown = jsonl.quote(weight)
        raise errors.InputError(
            f"{where}.weight: expected 0 or 1, and 1 only for answers, which follow a message; "
            f"found {shown}"
        )


def _source_of_ids(fields: Mapping[str, Any], prompt: Sequence[int]) -> str:
    """Returns the source by the prompt as outputs.jsonl shows it, or else by its token ids."""
    shown = fields.get("prompt")
    if isinstance(shown, str) and shown:
        return _source([{"role": "user", "content": shown}])
    try:
        return _source(jsonl.check_messages(shown))
    except errors.InputError:
        return _hash(prompt)


def _source(messages: Sequence[Mapping[str, Any]]) -> str:
    """Hashes the root of a conversation, which also lines of its single turns begin with.

    The root is everything before the first answer, without a greeting of the assistant.
    """
    answers = _answers(messages)
    opening = messages[: answers[0]] if answers else messages
    return _hash(
        [
            {"role": message["role"], "content": message["content"]}
            for message in opening
            if message["role"] != ASSISTANT
        ]
    )


def _answers(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the places of the assistant's messages, without a greeting at the beginning."""
    return [
        place for place, message in enumerate(messages) if place and message["role"] == ASSISTANT
    ]


def _hash(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
