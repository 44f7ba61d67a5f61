"""Tables for terminals, which keep all their columns."""

from collections.abc import Sequence

from rich.cells import cell_len

_GAP = "  "


def table_lines(
    rows: Sequence[Sequence[str]], *, keys: int = 1, width: int | None = None
) -> list[str]:
    """Returns a table as lines with aligned columns; the first row holds the heads.

    Columns that do not fit follow below, beside the key columns once more.

    Args:
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
