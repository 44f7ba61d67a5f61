"""Lengths and defects of the answers of a training set, which are reported before training."""

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from dflash.data.corpus import SUPERVISED, Corpus

MANY = 0.1  # Fraction of the answers from which on a defect is worth a warning.
_SAMPLED = 4096  # Documents that are examined, from all over the corpus.
_LONGEST_PERIOD = 64  # Tokens that an answer may repeat to count as a loop.
_REPEATS, _LEAST_LOOP = 3, 24  # Least number of repeats, and of tokens, of a loop.
_ADVICE = {
    "are empty": "the prompts may lack the chat template; check prompts.chat or answers.chat",
    "do not end with an end token": "they may be cut off; raise max_new_tokens, or drop them",
    "end in a loop": "sample them at a higher temperature, or drop them",
}


@dataclasses.dataclass(frozen=True)
class AnswerCheck:
    """Lengths and defects of answers.

    Attributes:
      lengths: Tokens of each answer, end token included, int64 [answers].
      defects: Number of answers by defect; an answer may have several.
    """

    lengths: np.ndarray
    defects: dict[str, int]

    def lines(self, name: str) -> Iterator[str]:
        """Yields the distribution of the lengths, and a warning for each frequent defect."""
        count = len(self.lengths)
        if not count:
            return
        quantiles = (f"{share} % up to {self._quantile(share):,}" for share in (10, 50, 90, 100))
        yield f"{name}: tokens per answer, of {count:,} answers: {', '.join(quantiles)}"
        for defect, number in self.defects.items():
            if number >= MANY * count:
                share = f"{100 * number / count:.0f} % of the answers"
                yield f"{name}: warning: {share} {defect}: {_ADVICE[defect]}"

    def _quantile(self, percent: int) -> int:
        return int(np.percentile(self.lengths, percent, method="higher"))


def check(corpus: Corpus, end_ids: Collection[int]) -> AnswerCheck:
    """Examines the answers of a corpus, of all documents or of a sample of them.

    Args:
      corpus: Encoded documents, whose supervised tokens are the answers.
      end_ids: Tokens that end an answer; empty if the model has none.
    Raises:
      InputError: The corpus is damaged.
    """
    lengths, defects = [], dict.fromkeys(_ADVICE, 0)
    picked = np.unique(np.linspace(0, len(corpus) - 1, min(len(corpus), _SAMPLED)).astype(np.int64))
    ends = np.array(sorted(end_ids), np.uint32)
    for index in picked:
        for answer in _answers(corpus.document(index)):
            lengths.append(len(answer))
            words = answer[~np.isin(answer, ends)]
            signs = (
                not len(words),
                len(answer) and len(ends) and answer[-1] not in ends,
                loops(words),
            )
            for defect, present in zip(defects, signs, strict=True):
                defects[defect] += bool(present)
    return AnswerCheck(np.array(lengths, np.int64), defects)


def loops(tokens: np.ndarray) -> bool:
    """Returns whether tokens [length] end with a repetition of the same few tokens."""
    for period in range(1, _LONGEST_PERIOD + 1):
        span = max(_REPEATS * period, _LEAST_LOOP)
        if len(tokens) < span:
            return False
        end = tokens[-span:]
        if np.array_equal(end[period:], end[:-period]):
            return True
    return False


def _answers(document: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the runs of supervised tokens of a document, without their bits; at least one."""
    marked = np.concatenate([[False], document >= SUPERVISED, [False]])
    edges = np.flatnonzero(marked[1:] != marked[:-1]).reshape(-1, 2)
    if not len(edges):
        yield document[:0]
    for begin, end in edges:
        yield document[begin:end] & ~SUPERVISED
