"""What a benchmark leaves in its directory: results.json, tables, plots, a page.

Every file is written whole, and results.json after every round of every task, so whatever ends a
run leaves the rounds that are done.
"""

import contextlib
import csv
import dataclasses
import io
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash.measure.cells import MIN_GROUPS, Average, Cell
from dflash.runs import directories

SCHEMA, STUDY_SCHEMA = "dflash.benchmark/1", "dflash.study/1"
RESULTS, STUDY, LOCK = "results.json", "study.json", ".lock"


class Directory:
    """A run's directory; nothing at all without one."""

    def __init__(self, path: pathlib.Path | None):
        """Use `open_directory`."""
        self.path = path

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file whole.

        Raises:
          WorkdirError: it cannot be written.
        """
        if self.path is None:
            return
        with directories.explained(self.path / name):
            if isinstance(content, str):
                directories.write_whole(self.path / name, content)
            else:
                temporary = self.path / f".{name}.tmp"
                temporary.write_bytes(content)
                temporary.replace(self.path / name)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes values as JSON."""
        text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
        self.write(name, text + "\n")


@contextlib.contextmanager
def open_directory(path: str | None, config_yaml: str) -> Iterator[Directory]:
    """Takes a directory for one run, and makes it where it is missing.

    What an earlier run of the same config left is replaced.

    Args:
      path: where; `~` is the home directory; None for nowhere.
      config_yaml: the resolved config, kept beside the results.
    Raises:
      WorkdirError: it cannot be written, is in use, or belongs to a run of another config.
    """
    if path is None:
        yield Directory(None)
        return
    directory = pathlib.Path(path).expanduser()
    with directories.explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        directories.lock(directory, descriptor)
        _check_config(directory, config_yaml)
        opened = Directory(directory)
        opened.write(directories.CONFIG, config_yaml)
        yield opened
    finally:
        os.close(descriptor)


def _check_config(directory: pathlib.Path, config_yaml: str) -> None:
    """Refuses to write over the results of another config."""
    if any((directory / name).exists() for name in (RESULTS, STUDY)):
        directories.check_config(directory, config_yaml)


def as_values(
    cells: Sequence[Cell], averages: Sequence[Average], facts: Mapping[str, Any], *, complete: bool
) -> dict[str, Any]:
    """The content of results.json; docs/measuring.md says what each key means."""
    return {
        "schema": SCHEMA,
        "complete": complete,
        **facts,
        "averages": [dataclasses.asdict(one) for one in averages],
        "cells": [dataclasses.asdict(one) for one in cells],
    }


FIGURES = (
    *("rounds", "prompts", "block_size", "output_tokens", "cycles", "tau"),
    *("ttft_ms", "tpot_ms", "tokens_per_second", "speedup", "speedup_low", "speedup_high"),
    *("speedup_with_prefill", "identical_share", "checked", "correct_share", "cycle_ms"),
    *("draft_ms", "verify_ms", "rest_ms", "ideal_speedup", "share_of_ideal", "acceptance"),
)


def rows(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of results.json as lines of a table: task, strategy and `FIGURES`."""
    found = []
    for cell in values["cells"]:
        low, high = cell["speedup_interval"] or (None, None)
        cost = {f"{name}_ms": value for name, value in (cell["cost_ms"] or {}).items()}
        own = {"speedup_low": low, "speedup_high": high}
        line = {**cell, **cost, **own, "acceptance": values["acceptance"]["source"]}
        found.append({column: line.get(column) for column in ("task", "strategy", *FIGURES)})
    return found


def table_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys as CSV."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def lines(cells: Sequence[Cell], averages: Sequence[Average]) -> list[str]:
    """The cells as text for a terminal."""
    rows = [("task", "strategy", "τ", "TTFT ms", "TPOT ms", "tok/s", "speed-up", "95 %")]
    rows[0] += ("same", "right", "cycle ms", "draft", "verify", "rest", "of ideal")
    for cell in cells:
        cost = cell.cost_ms
        rows.append(
            (
                *(cell.task, cell.strategy, _number(cell.tau), _number(cell.ttft_ms)),
                *(_number(cell.tpot_ms), _number(cell.tokens_per_second, 1)),
                *(_number(cell.speedup), _interval(cell.speedup_interval)),
                *(_percent(cell.identical_share), _percent(cell.correct_share)),
                *(_number(getattr(cost, part, None)) for part in _PARTS),
                _percent(cell.share_of_ideal),
            )
        )
    for one in averages:
        rows.append(
            (
                *("mean", one.strategy, _number(one.tau), "", "", "", _number(one.speedup)),
                *(_interval(one.speedup_interval), _percent(one.identical_share)),
                *(_percent(one.correct_share), "", "", "", "", _percent(one.share_of_ideal)),
            )
        )
    return aligned(rows)


_PARTS = ("cycle", "draft", "verify", "rest")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines, columns aligned: the first two left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def limits(cells: Sequence[Cell]) -> list[str]:
    """For each strategy that drafts, the largest of its losses."""
    found = []
    for cell in cells:
        if cell.block_size == 1 or not cell.losses or cell.tau is None:
            continue
        worst = max(cell.losses, key=cell.losses.get)
        rows, loss = cell.block_size, cell.losses[worst]
        words = {
            "verify": f"verifying {rows} rows costs {loss:.2f} plain tokens",
            "draft": f"draft and verification cost {loss:.2f} times the verification",
            "rest": f"a cycle costs {loss:.2f} times its two forwards",
        }
        found.append(
            f"{cell.task}, {cell.strategy}: τ {cell.tau:.2f} gives {cell.speedup or 0:.2f}×; "
            f"largest loss: {words[worst]}"
        )
    return found


def notes(cells: Sequence[Cell]) -> list[str]:
    """Says which tasks have no interval, and why."""
    few = {cell.task: cell.groups for cell in cells if cell.speedup and not cell.speedup_interval}
    if not few:
        return []
    counts = ", ".join(f"{task} has {groups}" for task, groups in few.items())
    return [
        f"no interval with fewer than {MIN_GROUPS} groups of prompts to draw from, each as many as "
        f"are decoded together: {counts}"
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _interval(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}"
