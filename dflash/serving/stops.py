"""Search for stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


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
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, final: bool = False) -> str:
        """Appends a piece of text and returns the text that is now final.

        Args:
          text: Next piece; ignored after a stop string.
          final: Whether this is the last piece, so that nothing is held back.
        """
        if self.found is not None:
            return ""
        text = self._held + text
        self._held = ""
        # Choose the stop string that ends first and, among those that end together, the longest.
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
        """Returns the length of the longest end of a text with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if self._opens(text[len(text) - n :])), 0)

    def _opens(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
