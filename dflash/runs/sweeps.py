"""Execution of a sweep's points, each in a directory of its own, with a table of the results.

    WORKDIR/points/NAME/             work directory of a point's run
    WORKDIR/points/NAME/point.json   figures of a finished point
    WORKDIR/sweep.csv                one line per finished point

Finished points are skipped, so that the same command continues where an earlier one ended, and a
sweep with more values runs only the new points. Several hosts may share a work directory.
"""

import abc
import csv
import dataclasses
import io
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from dflash import errors
from dflash.config import loader
from dflash.config.sweep_points import Sweep, SweepPoint, attributed, label
from dflash.runs import shards
from dflash.runs.directory import another_config, check_config
from dflash.runs.display import Display
from dflash.runs.shards import Shard
from dflash.storage import files

POINTS, POINT, TABLE = "points", "point.json", "sweep.csv"


class Runner(abc.ABC):
    """Command that runs the points of a sweep; `registry.RUNS` lists the subclasses.

    A command that measures several cells, such as the tasks and strategies of a benchmark, prefixes
    each figure with the cell's name: math.dflash.tau.

    Attributes:
      shown: Names of the figures that are shown in the terminal's table.
    """

    metrics: ClassVar[tuple[str, ...]]
    shown: ClassVar[tuple[str, ...]]

    def __init__(self, display: Display):
        """Takes the display for progress."""
        self._display = display

    @abc.abstractmethod
    def check(self, config: Any) -> None:
        """Raises UserError for problems of a config that can be found without running it."""

    @abc.abstractmethod
    def affinity(self, config: Any) -> str:
        """Returns a key of the expensive setup; points with equal keys run one after another."""

    @abc.abstractmethod
    def run(self, config: Any, directory: pathlib.Path) -> Mapping[str, Any]:
        """Runs or resumes a config in its work directory, and returns its metrics."""

    def finish(
        self, sweep: Sweep, rows: Mapping[str, Mapping[str, Any]], directory: pathlib.Path
    ) -> Sequence[str]:
        """Writes what a command has to show beside the table; returns the names of the files."""
        return ()


@dataclasses.dataclass(frozen=True)
class SweepOutcome:
    """State of a sweep.

    Attributes:
      rows: Values of the axes' keys and metrics of finished points, by name.
    """

    rows: Mapping[str, Mapping[str, Any]]
    failed: Mapping[str, str]


def run(
    sweep: Sweep,
    runner: Runner,
    directory: pathlib.Path,
    display: Display,
    *,
    index: int | None = None,
    shard: Shard = shards.WHOLE,
) -> SweepOutcome:
    """Runs the unfinished points of a sweep; if one fails, the others still run.

    Args:
      index: Index of the only point to run, from 0; None runs all.
    Returns:
      Finished points, including those of earlier runs, and failed points.
    Raises:
      ConfigError: The index is out of range, or a point is invalid; no point has run.
      WorkdirError: The directory cannot be used, or belongs to other configs.
    """
    points = list(sweep.points.values())
    if index is not None and not 0 <= index < len(points):
        raise errors.ConfigError(f"--index: {index}, but the points are 0 to {len(points) - 1}")
    chosen = shard.of(points if index is None else [points[index]])
    rows = finished(sweep, directory)
    pending = [point for point in chosen if point.name not in rows]
    _check(runner, directory, pending)
    with files.explained(directory):
        files.make_private(directory)
        write_table(directory)
    skipped = len(chosen) - len(pending)
    if skipped:
        display.note(f"{skipped} of {len(chosen)} points are already finished")
    failed = {}
    for number, point in enumerate(_in_order(runner, pending), start=1):
        title = f"[{skipped + number}/{len(chosen)}] {point.name}"
        try:
            metrics = runner.run(point.config, _directory(directory, point))
        # jax's errors, such as one for too little device memory, are RuntimeErrors.
        except (errors.UserError, RuntimeError, MemoryError) as error:
            failed[point.name] = str(error).partition("\n")[0] or type(error).__name__
            display.note(f"{title}: failed: {failed[point.name]}")
            continue
        _record(directory, point, _named(runner.metrics, metrics))
        main = _named(runner.shown, metrics)
        display.note(f"{title}: {', '.join(f'{key} {shown(main[key])}' for key in main)}")
    return SweepOutcome(finished(sweep, directory), failed)


def finished(sweep: Sweep, directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the rows of finished points, by name; raises WorkdirError if one is unusable."""
    rows = {}
    for point in sweep.points.values():
        path = _directory(directory, point) / POINT
        if not path.exists():
            continue
        rows[point.name] = row = _read_row(path)
        # An earlier version may have computed another hash, so compare the configs themselves.
        same = row["config_hash"] == loader.config_hash(point.config)
        if not same and not check_config(path.parent, point.config):
            raise another_config(path.parent)
    return rows


def _read_row(path: pathlib.Path) -> dict[str, Any]:
    """Returns values, metrics and config_hash of a point; raises WorkdirError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        hashed = {"config_hash": content["config_hash"]}
        return {**content["values"], **content["metrics"], **hashed}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.WorkdirError(f"{path}: damaged: delete it to run the point again") from error


def write_table(directory: pathlib.Path) -> None:
    """Writes the finished points of all sweeps and hosts in a directory as a table.

    Another host may finish a point and write its table meanwhile. So each host reads the points
    again after it has written, and the last one writes them all.
    """
    rows: list[dict[str, Any]] = []
    while rows != (rows := _all_rows(directory)):
        columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        files.write_whole(directory / TABLE, text.getvalue())


def _all_rows(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns all points of a directory as rows of the table; numbers in names sort by value."""
    paths = {path.parent.name: path for path in directory.glob(f"{POINTS}/*/{POINT}")}
    names = sorted(paths, key=lambda name: [x.zfill(9) for x in re.split(r"(\d+)", name)])
    rows = ({"name": name, **_read_row(paths[name])} for name in names)
    return [{key: _cell(value) for key, value in row.items()} for row in rows]


def columns(runner: Runner | type[Runner], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the keys of the shown figures that occur in any row."""
    return list(dict.fromkeys(key for row in rows for key in _named(runner.shown, row)))


def _named(names: Sequence[str], figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: figures[key] for name in names for key in figures if key.rpartition(".")[2] == name
    }


def shown(value: Any) -> str:
    """Returns a figure as text with four digits, or – for None."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else label(value)


def _check(runner: Runner, directory: pathlib.Path, pending: Sequence[SweepPoint]) -> None:
    problems: dict[str, list[str]] = {}
    for point in pending:
        try:
            check_config(_directory(directory, point), point.config)
            runner.check(point.config)
        except errors.UserError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(point.name)
    if problems:
        raise errors.ConfigError(*attributed(problems, max(len(pending), 2)))


def _in_order(runner: Runner, points: Sequence[SweepPoint]) -> Iterator[SweepPoint]:
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(runner.affinity(point.config), []).append(point)
    for group in groups.values():
        yield from group


def _record(directory: pathlib.Path, point: SweepPoint, metrics: Mapping[str, Any]) -> None:
    config_hash = loader.config_hash(point.config)
    content = {"config_hash": config_hash, "values": point.values, "metrics": metrics}
    with files.explained(directory):
        files.write_whole(_directory(directory, point) / POINT, files.to_json(content))
        write_table(directory)


def _directory(directory: pathlib.Path, point: SweepPoint) -> pathlib.Path:
    return directory / POINTS / point.name


def _cell(value: Any) -> Any:
    return label(value) if isinstance(value, list | dict | bool) or value is None else value


def table(
    sweep: Sweep, columns: Iterable[str], rows: Mapping[str, Mapping[str, Any]]
) -> list[list[str]]:
    """Returns heads and finished points as rows: values of the axes, then `columns`."""
    keys, columns = [key for axis in sweep.axes for key in axis], list(columns)
    return [
        [*keys, *columns],
        *(
            [*(label(row[key]) for key in keys), *(shown(row.get(key)) for key in columns)]
            for row in rows.values()
        ),
    ]
