"""Search for stop strings in a text that arrives in pieces."""

import itertools
from collections.abc import Sequence

from dflash.text import markers


class StopFinder:
    """Incremental search that truncates a text at its first stop string.

    While the end of the text may be the beginning of a stop string, `push` holds it back. So text
    that `push` has returned is final.

    Attributes:
      found: Stop string that ended the text; None if there was none so far.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """Creates a finder with an empty text.

        Args:
          stops: Stop strings, none of them empty.
          include: Return the stop string as part of the text.
        """
        self._stops, self._include = stops, include
        self._held, self._visible = "", b""  # Text that is held back; a byte 0 hides a character.
        self._exempt = 0  # Characters of `_held` with which no stop string may end.
        self.found: str | None = None

    def push(
        self, text: str, *, hidden: str = "", exempt: bool = False, final: bool = False
    ) -> str:
        """Appends a piece of text and returns the text that is now final.

        Args:
          text: Next piece; ignored after a stop string.
          hidden: Text after it that stop strings match and that no result contains.
          exempt: Whether no stop string may end within this piece; one may begin there.
          final: Whether this is the last piece, so that nothing is held back.
        """
        if self.found is not None:
            return ""
        visible = self._visible + b"\1" * len(text) + b"\0" * len(hidden)
        text = self._held + text + hidden
        if exempt:
            self._exempt = len(text)
        # Choose the stop string that ends first and, among those that end together, the longest.
        ends = [(end, -len(stop), stop) for stop in self._stops if (end := self._end(stop, text))]
        if ends:
            size, length, self.found = min(ends)
            size += 0 if self._include else length
        else:
            size = len(text) - (0 if final else markers.unfinished(text, self._stops))
        self._held, self._visible = text[size:], visible[size:]
        self._exempt = max(0, self._exempt - size)
        return "".join(itertools.compress(text[:size], visible))

    def _end(self, stop: str, text: str) -> int:
        """Returns where a stop string first ends in a text; 0 if it does not."""
        start = text.find(stop, max(0, self._exempt + 1 - len(stop)))
        return 0 if start < 0 else start + len(stop)
