"""Encodes conversations as token ids with supervision bits, and stores them on disk.

A document is a uint32 array of token ids. The highest bit marks supervised tokens, which a model
learns to predict: the tokens of answers, including the end token. A corpus is a concatenation of
documents.
"""

import array
import contextlib
import hashlib
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator

import numpy as np

from dflash import errors
from dflash.data import corpus as corpora
from dflash.data import store, supervision
from dflash.data.corpus import SUPERVISED, Corpus
from dflash.data.dataset import Dataset
from dflash.data.example import Example, Split
from dflash.text import jsonl
from dflash.text.tokenizer import ByteTokenizer, Tokenizer

VERSION = 2  # raise it when the same examples yield other ids, marks or rows
_LAYOUT = 3  # raise it when the format of the files, or the ids of a text, change
_FIRST_REPORT_SECONDS = 5.0  # enough to tell how long the rest takes
_REPORT_SECONDS = 30.0  # between later reports


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError if a tokenizer has more tokens than a model."""
    if tokenizer.vocab_size > vocab_size:
        raise errors.ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's vocab_size is "
            f"{vocab_size}: give the model at least as many"
        )


def encode(example: Example, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the documents of an example, usually one: uint32 [length], with supervision bits.

    Questions and answers are encoded separately, so that training sees the token ids that decoding
    reads and writes; see `supervision`.
    """
    if example.output_ids:
        prompt, output = (
            np.array(ids, np.uint32) for ids in (example.prompt_ids, example.output_ids)
        )
        yield _unmark_first(np.concatenate([prompt, output | SUPERVISED]))
        return
    try:
        for segments in supervision.segments(example, tokenizer):
            yield _encode_segments(segments, tokenizer)
    except errors.InputError as error:
        place = example.place or f"data set {example.task}"
        raise errors.InputError(f"{place}: {error}") from error


def _encode_segments(segments: supervision.Segments, tokenizer: Tokenizer) -> np.ndarray:
    pieces = []
    for place, (text, supervised) in enumerate(segments):
        encoded = tokenizer.encode_rendered(text, beginning=place == 0)
        ids = np.array(encoded, np.uint32)
        pieces.append(ids | SUPERVISED if supervised else ids)
    return _unmark_first(np.concatenate(pieces))


def open_corpus(
    dataset: Dataset, split: Split, tokenizer: Tokenizer, directory: pathlib.Path
) -> Corpus:
    """Opens a split of a data set as token ids; encodes and stores it on the first call."""
    content = f"{dataset.name} {dataset.version} {dataset.variant} {split}"
    key = f"{content} {VERSION} {tokenizer.fingerprint}"
    fingerprint = hashlib.sha256(key.encode()).hexdigest()[:16]
    name, stem = f"{dataset.name}/{split}", f"{dataset.name}-{split}-{fingerprint}"
    path = directory / "encoded" / f"{stem}-{_LAYOUT}"
    if not corpora.is_whole(path):
        for old in path.parent.glob(f"{stem}-*"):
            print(f"data: {old} is from an earlier version; delete it", file=sys.stderr)
        with store.locked(directory):
            if not corpora.is_whole(path):
                _store(dataset, split, tokenizer, path)
    return corpora.open_stored(path, name, fingerprint)


def _store(dataset: Dataset, split: Split, tokenizer: Tokenizer, path: pathlib.Path) -> None:
    """Encodes a split and stores it as a corpus.

    Examples are encoded in the order of the data set into a temporary corpus, and its documents are
    then copied in a fixed random order. So memory does not depend on the number of tokens.
    """
    name = f"{dataset.name}/{split}"
    first_example = next(dataset.examples(split), None)
    if first_example is None:
        raise dataset.empty(split)
    count = dataset.count(split)
    total = f", {count} examples" if count else ""
    print(f"data: encoding {name}{total}, once, in {path.parent}", file=sys.stderr)
    _warn_of_endless_answers(first_example, tokenizer, name)
    ends = array.array("q", [0])  # total number of documents after each example
    problems: list[str] = []

    def documents() -> Iterator[np.ndarray]:
        for example in _report_progress(dataset.examples(split), name, count):
            try:
                encoded = list(encode(example, tokenizer))
            except errors.InputError as error:
                problems.append(str(error))
                continue
            ends.append(ends[-1] + len(encoded))
            yield from encoded
        if problems:
            raise errors.InputError(jsonl.summarize(name, problems, "conversations"))

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        in_order = pathlib.Path(scratch) / "in_order"
        corpora.write(in_order, documents())
        corpus = corpora.open_stored(in_order, name, "")
        corpora.write(
            path,
            (
                corpus.document(number)
                for index in shuffled_order(split, len(ends) - 1)
                for number in range(ends[index], ends[index + 1])
            ),
        )
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    print(f"data: encoded {name}, {len(ends) - 1} examples, {size:.1f} MB", file=sys.stderr)


def _warn_of_endless_answers(example: Example, tokenizer: Tokenizer, name: str) -> None:
    if not example.messages or isinstance(tokenizer, ByteTokenizer):
        return
    with contextlib.suppress(errors.InputError):  # encoding the example names the problem
        if not supervision.ends_answers(example, tokenizer):
            print(
                f"data: {name}: the chat template ends answers without a special token, so the "
                "model does not learn where they end",
                file=sys.stderr,
            )


def shuffled_order(split: Split, count: int) -> np.ndarray:
    """Returns the fixed random order in which the examples of a split are stored, int64 [count].

    Earlier versions stored examples with tensorflow-datasets, which sorts them by this hash. With
    the same order, a run that one of them began continues with the same rows.
    """
    digests = bytearray()
    for index in range(count):
        digests += hashlib.md5(f"{split}{index}".encode(), usedforsecurity=False).digest()
    high, low = np.frombuffer(digests, ">u8").reshape(count, 2).T
    return np.lexsort((low, high))


def _report_progress(
    examples: Iterable[Example], name: str, count: int | None
) -> Iterator[Example]:
    begin = time.monotonic()
    next_report = begin + _FIRST_REPORT_SECONDS
    for done, example in enumerate(examples):
        now = time.monotonic()
        if done and now >= next_report:
            state = f"{done} examples so far"
            if count:
                minutes = (now - begin) * (count / done - 1) / 60
                state = f"{done} of {count} examples, about {minutes:.1f} min left"
            print(f"data: encoding {name}: {state}", file=sys.stderr)
            next_report = now + _REPORT_SECONDS
        yield example


def _unmark_first(document: np.ndarray) -> np.ndarray:
    document[:1] &= ~SUPERVISED  # no token precedes the first one to predict it from
    return document
