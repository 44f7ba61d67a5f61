"""Data set `jsonl`: the user's own conversations, one JSON object per line.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "response": "…"}            one question and its answer
    {"prompt_ids": [1, 2], "output_ids": [3]}   token ids, as in outputs.jsonl of a decode run

A hash of everything before the last answer determines the split, so two answers to one question
are always in the same split.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.data.example import Example, Split, pair, split_of
from dflash.storage import paths
from dflash.text import jsonl

TASK = "jsonl"
_KINDS = "messages, prompt and response, or prompt_ids and output_ids"


def examples(files: Sequence[str], split: Split, held_out_percent: float) -> Iterator[Example]:
    """Yields the examples of a split in the order of the files and their lines.

    Args:
      files: Paths of the files.
      split: Split to yield.
      held_out_percent: Percentage of the questions in validation, and the same again in test.
    Raises:
      InputError: A file is empty, or lines are unusable. The message lists the first ten of these
        lines and counts the others.
    """
    for file in files:
        problems: list[str] = []
        empty = True
        for place, read in jsonl.entries(file):
            empty = False
            try:
                example = _example(read())
            except errors.InputError as error:
                problems.append(f"{place}: {error}")
            else:
                if not problems and split_of(example.source, held_out_percent) == split:
                    yield example
        if problems:
            raise errors.InputError(jsonl.summarize(file, problems, "lines"))
        if empty:
            raise errors.InputError(f"{file}: contains no conversations")


def content_hash(file: str) -> bytes:
    """Returns the SHA-256 digest of a file.

    Raises:
      InputError: The file cannot be read.
    """
    try:
        with paths.to_path(file).open("rb") as content:
            return hashlib.file_digest(content, "sha256").digest()
    except OSError as error:
        raise errors.InputError(f"{file}: cannot be read: {error.strerror or error}") from error


def _example(fields: Mapping[str, Any]) -> Example:
    """Builds the example of a line.

    Raises:
      InputError: The line is unusable.
    """
    if "output_ids" in fields:
        prompt = jsonl.check_ids(fields.get("prompt_ids"))
        output = jsonl.check_ids(fields["output_ids"], "output_ids")
        invalid = [token for token in (*prompt, *output) if not 0 <= token < 2**31]
        if invalid:
            raise errors.InputError(f"token id {invalid[0]} is not in the range 0 to 2**31 - 1")
        return Example(TASK, _source(prompt), prompt_ids=prompt, output_ids=output)
    if "messages" in fields:
        checked = jsonl.check_messages(fields["messages"])
        messages = tuple({key: message[key] for key in ("role", "content")} for message in checked)
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise errors.InputError("messages: expected a question, and an answer at the end")
        if not messages[-1]["content"]:
            raise errors.InputError("messages: the answer is empty")
        return Example(TASK, _source(messages[:-1]), messages)
    if "prompt" in fields and "response" in fields:
        prompt = jsonl.check_text(fields["prompt"])
        response = jsonl.check_text(fields["response"], "response")
        return pair(TASK, _source([{"role": "user", "content": prompt}]), prompt, response)
    keys = ", ".join(map(repr, list(fields)[:5])) or "nothing"
    raise errors.InputError(f"expected {_KINDS}; found {keys}")


def _source(question: Any) -> str:
    canonical = json.dumps(question, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
