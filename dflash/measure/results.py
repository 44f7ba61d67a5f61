"""Files of a benchmark's directory: results.json, tables, plots and a page.

Every file is written atomically. results.json is written after each round of each task, so a run
that ends early keeps its completed rounds.
"""

import csv
import dataclasses
import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure import warnings
from dflash.measure.cells import Average, Cell
from dflash.runs import outputs
from dflash.runs.directory import RunDirectory

SCHEMA, STUDY_SCHEMA = "dflash.benchmark/1", "dflash.study/1"
RESULTS, STUDY = "results.json", "study.json"
CATEGORIES = "categories.json"  # Written if questions have categories; see `speed_bench`.


def open_directory(path: str | os.PathLike | None, config: BenchmarkRun) -> RunDirectory:
    """Opens a directory for a benchmark; results of the same config are replaced.

    Raises:
      WorkdirError: The directory cannot be written, is in use, or belongs to a run with another
        config.
    """
    return RunDirectory(path, config, is_used=_has_results)


def _has_results(directory: pathlib.Path) -> bool:
    return any((directory / name).exists() for name in (RESULTS, STUDY))


def as_values(
    cells: Sequence[Cell], averages: Sequence[Average], facts: Mapping[str, Any], *, complete: bool
) -> dict[str, Any]:
    """Returns the content of results.json; docs/measuring.md defines each key."""
    return {
        "schema": SCHEMA,
        "complete": complete,
        **facts,
        "averages": [_values(average) for average in averages],
        "cells": [_values(cell) for cell in cells],
    }


def _values(figures: Cell | Average) -> dict[str, Any]:
    values = dataclasses.asdict(figures)
    values[warnings.KEY] = values.pop("warnings")
    return values


FIGURES = (
    *(
        "temperature",
        "rounds",
        "prompts",
        "busy_slots",
        "block_size",
        "output_tokens",
        "cycles",
        "tau",
    ),
    *("speedup", "speedup_low", "speedup_high"),
    *("identical_share", "checked", "correct_share", "cycle_ms"),
    *("draft_ms", "verify_ms", "rest_ms", "roofline_ms", "ideal_speedup", "share_of_ideal"),
    *("acceptance", warnings.KEY),
)


def rows(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the cells of results.json as table rows: task, strategy and `FIGURES`."""
    table = []
    for cell in values["cells"]:
        low, high = cell["speedup_interval"] or (None, None)
        cost = {f"{name}_ms": value for name, value in (cell["cost_ms"] or {}).items()}
        columns = {"speedup_low": low, "speedup_high": high}
        reasons = [warning["words"] for warning in cell.get(warnings.KEY, ())]
        columns[warnings.KEY] = "; ".join(reasons) or None
        line = {**cell, **cost, **columns, "acceptance": values["acceptance"]["source"]}
        table.append({column: line.get(column) for column in ("task", "strategy", *FIGURES)})
    return table


def table_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows with the same keys as CSV."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def common_facts(config: BenchmarkRun) -> dict[str, Any]:
    """Returns the settings and versions that every figure of a run depends on."""
    used = math.prod(dataclasses.asdict(config.mesh).values())
    return {
        "batch_size": config.decode.batch_size,
        "config_hash": loader.config_hash(config),
        "config": loader.to_dict(config),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()[:used]],
        "processes": jax.process_count(),
        "versions": outputs.versions(),
    }
