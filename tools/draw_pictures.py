"""Draws docs/pictures/drafting.svg from a run of the embedded tiny family.

    python -m dflash.decode configs/tiny_dflash2.yml --workdir runs/pictures
    python tools/draw_pictures.py runs/pictures

The picture shows the cycles of the first prompt: accepted drafted tokens, the bonus token that the
target adds to each cycle, and plain decoding for comparison.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

_FILE = pathlib.Path(__file__).parents[1] / "docs" / "pictures" / "drafting.svg"
_CELL, _GAP, _LEFT, _TOP = 22, 3, 110, 84
_COLORS = {"accepted": "#3f51b5", "bonus": "#ff9800", "last": "#9e9e9e", "plain": "#90a4ae"}


def _rect(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{_COLORS[kind]}"/>'


def _text(x: int, y: int, text: str, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{text}</text>'


def _legend() -> Iterator[str]:
    """Yields the legend, in one row."""
    x = _LEFT
    for kind, text in (
        ("accepted", "accepted draft"),
        ("bonus", "bonus token of the target"),
        ("last", "last token"),
    ):
        yield _rect(x, 50, 14, 14, kind)
        yield _text(x + 20, 62, text)
        x += 40 + 7 * len(text)


def _cycles(lengths: list[int]) -> Iterator[str]:
    """Yields a row for each cycle and a cell for each token that it committed."""
    for i, length in enumerate(lengths):
        y = _TOP + i * (_CELL + _GAP)
        yield _text(10, y + 16, f"cycle {i + 1}")
        for j in range(length):
            # A stop token may be a draft or a bonus token, so it has a color of its own.
            end = "last" if i == len(lengths) - 1 else "bonus"
            kind = end if j == length - 1 else "accepted"
            yield _rect(_LEFT + j * (_CELL + _GAP), y, _CELL, _CELL, kind)


def picture(drafted: dict[str, Any], plain: dict[str, Any]) -> str:
    """Returns the picture of an output as SVG.

    Args:
      drafted: Line of outputs.jsonl.
      plain: Line of baseline.jsonl for the same prompt.

    Raises:
      ValueError: The two outputs differ.
    """
    if drafted["output_ids"] != plain["output_ids"]:
        raise ValueError("the outputs with and without drafting differ")
    lengths, passes = drafted["acceptance_lengths"], len(plain["acceptance_lengths"])
    below = _TOP + len(lengths) * (_CELL + _GAP) + 30
    width = _LEFT + 16 * (_CELL + _GAP) + 10
    step = (width - _LEFT - 10) / passes
    committed = sum(lengths)
    body = [
        _text(10, 24, f"{committed} tokens in {len(lengths)} cycles of DFlash2, blocks of 16", 16),
        *_legend(),
        *_cycles(lengths),
        _text(10, below - 8, f"Plain decoding: the same {committed} tokens in {passes} passes"),
        *(
            f'<rect x="{_LEFT + i * step:.2f}" y="{below}" width="{step * 0.7:.2f}" '
            f'height="{_CELL}" fill="{_COLORS["plain"]}"/>'
            for i in range(passes)
        ),
    ]
    height = below + _CELL + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" fill="#222">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def main(arguments: list[str] | None = None) -> int:
    """Draws the picture and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdir", type=pathlib.Path, help="work directory of a decode run")
    workdir = parser.parse_args(arguments).workdir
    first = [
        json.loads((workdir / name).read_text(encoding="utf-8").splitlines()[0])
        for name in ("outputs.jsonl", "baseline.jsonl")
    ]
    _FILE.parent.mkdir(exist_ok=True)
    _FILE.write_text(picture(*first), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
