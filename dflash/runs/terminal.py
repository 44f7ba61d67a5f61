"""Text for terminals: tables that keep all their columns, and streamed words that stay whole."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len

_GAP = "  "
_TAB = 8


def table_lines(
    rows: Sequence[Sequence[str]], *, keys: int = 1, width: int | None = None
) -> list[str]:
    """Returns a table as lines with aligned columns; the first row holds the heads.

    Columns that do not fit follow below, beside the key columns once more.

    Args:
      rows: Heads and rows, all of the same length.
      keys: Number of leading columns that name a row; they are aligned left, all others right.
      width: Characters of a line; None for lines of any length.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    blocks = _blocks(widths, keys, width)
    lines: list[str] = []
    for block in blocks:
        if lines:
            lines.append("")
        for row in rows:
            cells = (_pad(row[place], widths[place], place < keys) for place in block)
            lines.append(_GAP.join(cells).rstrip())
    return lines


def _blocks(widths: Sequence[int], keys: int, width: int | None) -> list[list[int]]:
    """Returns the numbers of the columns that are shown beside each other."""
    names = list(range(keys))
    blocks = [names]
    for place in range(keys, len(widths)):
        extended = [*blocks[-1], place]
        length = sum(widths[i] for i in extended) + len(_GAP) * (len(extended) - 1)
        if width is None or length <= width or blocks[-1] == names:
            blocks[-1] = extended
        else:
            blocks.append([*names, place])
    return blocks


def _pad(text: str, width: int, to_left: bool) -> str:
    space = " " * (width - cell_len(text))
    return text + space if to_left else space + text


class TerminalEdit(NamedTuple):
    """Text to print, after erasing some characters before the cursor.

    Attributes:
      erase: Number of cells to erase.
      style: Style of the text, as given to `feed`.
    """

    erase: int
    text: str
    style: str

    @property
    def control(self) -> str:
        """Returns the control sequence that erases."""
        return f"\x1b[{self.erase}D\x1b[K" if self.erase else ""


class WordWrap:
    """Wraps streamed text between words, where a terminal would break them.

    A word that grows past the edge is erased and printed once more on the next line.
    """

    def __init__(self):
        """Starts at the beginning of a line."""
        self.reset()

    def reset(self) -> None:
        """Starts a line anew, after something else was printed."""
        self._column = 0
        self._word: list[tuple[str, str]] = []  # Characters of the word so far, with their styles.

    def feed(self, text: str, width: int, style: str = "") -> Iterator[TerminalEdit]:
        """Yields what to print for the next piece of text."""
        plain: list[str] = []  # Characters since the last break.
        for character in text:
            if self._fits(character, width - 1):  # In the last column a cursor's place is unclear.
                plain.append(character)
                self._advance(character, style)
                continue
            moved = [] if _breaks(character) else self._moved_word()
            yield TerminalEdit(0, "".join(plain), style)
            yield TerminalEdit(sum(cell_len(c) for c, _ in moved), "\n", style)
            for piece, piece_style in moved:
                yield TerminalEdit(0, piece, piece_style)
            self._column = sum(cell_len(piece) for piece, _ in moved)
            self._word = moved
            plain = [] if character.isspace() else [character]
            for piece in plain:
                self._advance(piece, style)
        if plain:
            yield TerminalEdit(0, "".join(plain), style)

    def _fits(self, character: str, width: int) -> bool:
        return character == "\n" or self._column + max(cell_len(character), 1) <= width

    def _moved_word(self) -> list[tuple[str, str]]:
        """Returns the characters to move to the next line; none of a word that fills its line."""
        length = sum(cell_len(character) for character, _ in self._word)
        return list(self._word) if length < self._column else []

    def _advance(self, character: str, style: str) -> None:
        if character == "\n":
            self.reset()
        elif character.isspace():
            self._column += _TAB - self._column % _TAB if character == "\t" else 1
            self._word = []
        else:
            cells = cell_len(character)
            self._column += cells
            word = [] if _breaks(character) else self._word
            self._word = [*word, (character, style)]


def _breaks(character: str) -> bool:
    return character.isspace() or cell_len(character) == 2
