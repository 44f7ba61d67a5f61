"""The directory of a benchmark: results.json, tables, plots, a page.

Every file is written whole, and results.json after every round of every task, so a run that ends
early leaves its finished rounds.
"""

import csv
import dataclasses
import io
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure.cells import MIN_GROUPS, Average, Cell
from dflash.runs.directory import RunDirectory

SCHEMA, STUDY_SCHEMA = "dflash.benchmark/1", "dflash.study/1"
RESULTS, STUDY = "results.json", "study.json"


def open_directory(path: str | os.PathLike | None, config: BenchmarkRun) -> RunDirectory:
    """Takes a directory for a benchmark; results of the same config are replaced.

    Args:
      path: where; None for a run that leaves nothing.
      config: of the run.
    Raises:
      WorkdirError: it cannot be written, is in use, or belongs to a run of another config.
    """
    return RunDirectory(path, config, is_used=_has_results)


def _has_results(directory: pathlib.Path) -> bool:
    return any((directory / name).exists() for name in (RESULTS, STUDY))


def as_values(
    cells: Sequence[Cell], averages: Sequence[Average], facts: Mapping[str, Any], *, complete: bool
) -> dict[str, Any]:
    """The content of results.json; docs/measuring.md defines each key."""
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
    """The cells of results.json as rows of a table: task, strategy and `FIGURES`."""
    found = []
    for cell in values["cells"]:
        low, high = cell["speedup_interval"] or (None, None)
        cost = {f"{name}_ms": value for name, value in (cell["cost_ms"] or {}).items()}
        own = {"speedup_low": low, "speedup_high": high}
        line = {**cell, **cost, **own, "acceptance": values["acceptance"]["source"]}
        found.append({column: line.get(column) for column in ("task", "strategy", *FIGURES)})
    return found


def table_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as CSV."""
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
