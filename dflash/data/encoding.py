"""Conversations as token ids, with supervised tokens marked; stored on disk.

A document is a uint32 array of ids. The highest bit marks a supervised token, which a model learns
to predict: the tokens of answers, end token included. A corpus is documents, concatenated.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dflash import errors
from dflash.data import store
from dflash.data.datasets import Dataset
from dflash.data.example import Example, Split
from dflash.runs import files
from dflash.text.chat_template import Messages
from dflash.text.tokenizer import Tokenizer

SUPERVISED = np.uint32(2**31)
VERSION = 1  # raise it when the same examples yield other ids or marks
_LAYOUT = 2  # raise it when the format of the files, or the ids of a text, change
_CHUNK_DOCUMENTS = 4096
_TOKENS, _OFFSETS, _FACTS = "tokens.npy", "offsets.npy", "facts.json"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Encoded documents.

    Attributes:
      name: name in error messages, such as "math/train".
      fingerprint: equal for equal contents.
      tokens: uint32 [total]; all documents, marks included; usually memory-mapped.
      offsets: int64 [documents + 1]; where each document begins, and the end.
      max_id: the largest token id.
    """

    name: str
    fingerprint: str
    tokens: np.ndarray
    offsets: np.ndarray
    max_id: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """uint32 [length]: one document, marks included."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that every id of a tokenizer is in a model's vocabulary.

    Raises:
      ConfigError: the tokenizer is larger.
    """
    if tokenizer.vocab_size > vocab_size:
        raise errors.ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's vocab_size is "
            f"{vocab_size}: give the model at least as many"
        )


def encode(example: Example, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the documents of an example, usually one: uint32 [length], with marks.

    Questions are encoded as for decoding, and answers separately, as decoding produces them. Some
    chat templates render earlier answers differently from the last one; each answer then ends a
    document of its own, so that training sees what decoding sees.

    Raises:
      InputError: the tokenizer has no chat template, or it cannot render the messages.
    """
    if example.output_ids:
        prompt, output = (
            np.array(ids, np.uint32) for ids in (example.prompt_ids, example.output_ids)
        )
        yield _unmark_first(np.concatenate([prompt, output | SUPERVISED]))
        return
    for segments in _segments(example.messages, tokenizer):
        pieces = []
        for place, (text, supervised) in enumerate(segments):
            encoded = tokenizer.encode_rendered(text, beginning=place == 0)
            ids = np.array(encoded, np.uint32)
            pieces.append(ids | SUPERVISED if supervised else ids)
        yield _unmark_first(np.concatenate(pieces))


def open_corpus(
    dataset: Dataset, split: Split, tokenizer: Tokenizer, directory: pathlib.Path
) -> Corpus:
    """Opens a split of a data set as token ids; encodes and stores it on the first call.

    Args:
      dataset: data set to encode.
      split: split of the data set.
      tokenizer: tokenizer of the model to train.
      directory: directory of all data sets.
    Raises:
      InputError: the data or the directory are unusable, what is stored there is damaged, or the
        split is empty.
    """
    content = f"{dataset.name} {dataset.version} {dataset.variant} {split}"
    key = f"{content} {VERSION} {tokenizer.fingerprint}"
    fingerprint = hashlib.sha256(key.encode()).hexdigest()[:16]
    name = f"{dataset.name}/{split}"
    path = directory / "encoded" / f"{dataset.name}-{split}-{fingerprint}-{_LAYOUT}"
    if not (path / _FACTS).exists():
        examples = store.open_split(dataset, split, directory)
        with store.locked(directory):
            if not (path / _FACTS).exists():
                print(f"data: encoding {name}: {len(examples)} examples, once", file=sys.stderr)
                _write(path, (part for example in examples for part in encode(example, tokenizer)))
                size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
                print(f"data: encoded {name}, {size:.1f} MB on disk", file=sys.stderr)
    max_id = _check(path)
    tokens, offsets = np.load(path / _TOKENS, mmap_mode="r"), np.load(path / _OFFSETS)
    return Corpus(name, fingerprint, tokens, offsets, max_id)


def join(name: str, documents: Sequence[np.ndarray]) -> Corpus:
    """A corpus in memory."""
    lengths = [len(document) for document in documents]
    tokens = np.concatenate([np.zeros(0, np.uint32), *documents])
    fingerprint = hashlib.sha256(tokens.tobytes() + repr(lengths).encode()).hexdigest()[:16]
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    return Corpus(name, fingerprint, tokens, offsets, _max_id(tokens))


def _max_id(tokens: np.ndarray) -> int:
    return int((tokens & ~SUPERVISED).max(initial=0))


def _write(path: pathlib.Path, documents: Iterable[np.ndarray]) -> None:
    """Writes a corpus, which is whole once it holds its facts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Its own, since where files cannot be locked another process may do the same.
    partial = pathlib.Path(
        tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    )
    try:
        _write_files(partial, documents)
        if not (path / _FACTS).exists():
            files.publish(partial, path, _FACTS)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_files(partial: pathlib.Path, documents: Iterable[np.ndarray]) -> None:
    lengths, chunk, max_id = [], [], 0
    with (partial / "tokens.raw").open("wb") as raw:

        def flush() -> None:
            nonlocal max_id
            tokens = np.concatenate([np.zeros(0, np.uint32), *chunk])
            max_id = max(max_id, _max_id(tokens))
            raw.write(tokens.tobytes())
            chunk.clear()

        for document in documents:
            lengths.append(len(document))
            chunk.append(document)
            if len(chunk) == _CHUNK_DOCUMENTS:
                flush()
        flush()
    _add_header(partial, sum(lengths))
    np.save(partial / _OFFSETS, np.cumsum([0, *lengths], dtype=np.int64))
    sums = {name: _checksum(partial / name) for name in (_TOKENS, _OFFSETS)}
    (partial / _FACTS).write_text(json.dumps({"max_id": max_id, "crc32": sums}))


def _check(path: pathlib.Path) -> int:
    """Compares a stored corpus with its checksums; returns its largest token id.

    Raises:
      InputError: a file is missing, or not as it was written.
    """
    file = path / _FACTS
    try:
        facts = json.loads(file.read_text())
        max_id, sums = int(facts["max_id"]), facts["crc32"]
        for name in (_TOKENS, _OFFSETS):
            file = path / name
            if _checksum(file) != sums[name]:
                raise ValueError("not as it was written")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise errors.InputError(f"{file}: damaged: delete {path} to encode it again") from error
    return max_id


def _checksum(file: pathlib.Path) -> int:
    """CRC-32 of a file: a gigabyte a second, so that opening stays cheap."""
    value = 0
    with file.open("rb") as content:
        while chunk := content.read(2**24):
            value = zlib.crc32(chunk, value)
    return value


def _add_header(directory: pathlib.Path, total: int) -> None:
    """Turns tokens.raw into tokens.npy, whose header needs the length first."""
    raw, whole = directory / "tokens.raw", directory / _TOKENS
    with whole.open("wb") as to, raw.open("rb") as content:
        header = {"descr": "<u4", "fortran_order": False, "shape": (total,)}
        np.lib.format.write_array_header_1_0(to, header)
        shutil.copyfileobj(content, to)
        to.flush()
        os.fsync(to.fileno())
    raw.unlink()


def _segments(messages: Messages, tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """Yields documents as pieces of rendered text, each with whether it is supervised."""
    document: list[tuple[str, bool]] = []
    so_far = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        question = tokenizer.render_chat(messages[:index])
        whole = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
        if not whole.startswith(question):
            question = _common_start(question, whole)
        if document and not question.startswith(so_far):
            yield document
            document, so_far = [], ""
        # The line break that templates put after the end token is not part of the answer.
        answer = whole[len(question) :].rstrip("\n")
        document += [(question[len(so_far) :], False), (answer, True)]
        so_far = question + answer
    if document:
        yield document


def _unmark_first(document: np.ndarray) -> np.ndarray:
    document[:1] &= ~SUPERVISED  # nothing precedes the first token, so nothing predicts it
    return document


def _common_start(one: str, other: str) -> str:
    pairs = zip(one, other, strict=False)
    return one[: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))]
