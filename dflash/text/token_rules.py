"""Tokens that an output may have, and sequences of tokens that it must not have.

As with grammars, the host computes a mask for each row of a cycle from the tokens that lead to it,
so the output is that of plain decoding under the same rules, whatever is drafted.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from dflash.text.grammar import Matcher, forbid


@dataclasses.dataclass(frozen=True)
class TokenRules:
    """Rules of an output.

    Attributes:
      allowed: Tokens that it may have, stop tokens among them; None for all.
      bad: Sequences of tokens of which none may be completed.
    """

    allowed: tuple[int, ...] | None = None
    bad: tuple[tuple[int, ...], ...] = ()

    def matcher(self, inner: Matcher | None) -> "RulesMatcher":
        """Returns a matcher at the beginning of an output.

        Args:
          inner: Matcher of a grammar that the output must match, too.
        """
        return RulesMatcher(self, inner)

    def apply(self, row: np.ndarray, before: Sequence[int]) -> None:
        """Clears the bits of all tokens that may not follow.

        Args:
          row: Mask, int32 [ceil(V / 32)].
          before: Tokens of the output so far.
        """
        if self.allowed is not None:
            bits = np.zeros(32 * len(row), bool)
            bits[list(self.allowed)] = True
            row &= np.packbits(bits, bitorder="little").view(np.int32)
        for *beginning, last in self.bad:
            if not beginning or tuple(before[-len(beginning) :]) == tuple(beginning):
                forbid(row, [last])


class RulesMatcher:
    """Position of an output within its rules; has the methods of `grammar.Matcher`."""

    def __init__(self, rules: TokenRules, inner: Matcher | None):
        self._rules, self._inner = rules, inner
        self._output_ids: list[int] = []
        self._words = 0

    @property
    def may_end(self) -> bool:
        """True if the output may end here; False if it ends because no token may follow."""
        if self._inner is not None:
            return self._inner.may_end
        row = np.full(self._words, -1, np.int32)
        self._rules.apply(row, self._output_ids)
        return bool(row.any())

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the output, of which none may be a stop token."""
        self._output_ids += tokens
        if self._inner is not None:
            self._inner.advance(tokens)

    def fill(
        self,
        masks: np.ndarray,
        tokens: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        ends: Sequence[int],
        first_end: int = 0,
    ) -> None:
        """Computes the masks of all rows; see `grammar.Matcher.fill`."""
        if self._inner is not None:
            self._inner.fill(masks, tokens, parents, ends=ends, first_end=first_end)
        self._words = masks.shape[1]
        for row, path in zip(masks, _paths(tokens, parents), strict=True):
            before = [*self._output_ids, *path]
            self._rules.apply(row, before)
            if self._inner is None and len(before) < first_end:
                forbid(row, ends)
            if not row.any():  # Nothing may follow: end the output, as an error.
                _allow(row, ends)


def _paths(tokens: Sequence[int], parents: Sequence[int] | None) -> Iterator[tuple[int, ...]]:
    """Yields the drafts that lead to each row of a proposal."""
    paths = [()]
    for draft, token in enumerate(tokens):
        paths.append((*paths[draft if parents is None else parents[draft]], token))
    return iter(paths)


def _allow(row: np.ndarray, tokens: Sequence[int]) -> None:
    for token in tokens:
        row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
