"""Finds stop strings in a text that arrives in pieces, and lets no half of one out."""

from collections.abc import Sequence


class StopFinder:
    """Passes a text on up to the first stop string in it.

    The end of the text so far is held back while it may be the beginning of a stop string, so what
    `push` returned, joined, never has to be taken back.

    Attributes:
      found: the stop string that the text came to; None: none so far.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """Takes the stop strings.

        Args:
          stops: none of them empty.
          include: whether to pass on the stop string itself, too.
        """
        self._stops, self._include = stops, include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, final: bool = False) -> str:
        """Takes the next piece; returns the text that is certain now, nothing once one was found.

        Args:
          text: the piece.
          final: whether nothing follows, so that nothing is held back.
        """
        if self.found is not None:
            return ""
        text = self._held + text
        self._held = ""
        # The one that is complete first; of several that end together, the longest.
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if ends:
            end, length = min(ends)
            self.found = text[end + length : end]
            return text[: end if self._include else end + length]
        if not final:
            keep = self._half_match(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return text

    def _half_match(self, text: str) -> int:
        """Characters at the end of a text that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if self._opens(text[len(text) - n :])), 0)

    def _opens(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
