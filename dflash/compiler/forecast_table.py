"""Text and JSON forms of a forecast, whose headings label all figures as expected."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dflash.compiler import compile_points
from dflash.compiler.forecast import PLAIN, CompiledCost, ExpectedSpeedup, Forecast

LABEL = "expected, not measured: the compiler's costs joined with known acceptance"
_SHORT = {"output head": "head"}


def lines(forecast: Forecast, contexts: Sequence[int]) -> list[str]:
    """Formats costs, the best choice by task, and mean speed-ups as lines of text.

    Strategies of unknown acceptance are listed with the acceptance that they would need.

    Args:
      forecast: Forecast.
      contexts: Context lengths in tokens.
    """
    text = []
    for context in contexts:
        text += ["", *_costs(forecast, context)]
    for context in contexts if forecast.tasks else ():
        text += ["", *_by_task(forecast, context)]
    return [*text, "", *_averages(forecast, contexts), *_unknown(forecast, contexts)]


def to_json(forecast: Forecast, contexts: Sequence[int]) -> dict[str, Any]:
    """Returns the forecast as JSON values: times in ms and sizes in bytes, per device."""
    cells = []
    for (name, batch), point in forecast.points.items():
        for context in contexts:
            cost = point.cost(context)
            choices = {
                task: forecast.expected(name, task, batch, context) for task in forecast.tasks
            }
            cells.append(
                {
                    "strategy": name,
                    "batch": batch,
                    "context": context,
                    "rows": point.rows,
                    "roofline_ms": cost.roofline_ms,
                    "cycles_ms": cost.cycles_ms or None,
                    "limits_ms": dict(cost.limits),
                    "memory_bytes": point.memory.at(context + point.rows),
                    "fits": forecast.fits(name, batch, context),
                    "expected": {
                        task: dataclasses.asdict(choice)
                        for task, choice in choices.items()
                        if choice
                    },
                }
            )
    best = [
        {"task": task, "batch": batch, "context": context, **dataclasses.asdict(choice)}
        for context in contexts
        for batch in forecast.batches
        for task in forecast.tasks
        if (choice := forecast.best(task, batch, context))
    ]
    return {
        "label": LABEL,
        "capacity_bytes": forecast.capacity_bytes,
        "points": compile_points.to_json(forecast.points),
        "cells": cells,
        "best": best,
    }


def _costs(forecast: Forecast, context: int) -> list[str]:
    text = [
        f"expected cost of a cycle after {context:,} tokens, ms",
        f"  {'batch':>5}  {'strategy':<12}{'rows':>5}{'roofline':>10}{'cycles':>9}{'× plain':>9}"
        f"  {'limited by':<18}{'memory':>9}",
    ]
    for batch in forecast.batches:
        plain = forecast.points[PLAIN, batch].cost(context)
        existing = [name for name in forecast.strategies if (name, batch) in forecast.points]
        for name in existing:
            point = forecast.points[name, batch]
            cost = point.cost(context)
            memory = f"{point.memory.at(context + point.rows) / 1e9:.1f} GB"
            if not forecast.fits(name, batch, context):
                memory += ": does NOT fit"
            text.append(
                f"  {batch:>5}  {name:<12}{point.rows:>5}{cost.roofline_ms:>10.2f}"
                f"{_number(cost.cycles_ms):>9}{cost.roofline_ms / plain.roofline_ms:>9.2f}"
                f"  {_limit(cost):<18}{memory:>9}"
            )
    return text


def _limit(cost: CompiledCost) -> str:
    name, fraction = cost.bottleneck
    return f"{_SHORT.get(name, name)} {100 * fraction:.0f} %"


def _number(value: float | None) -> str:
    return f"{value:.2f}" if value else "–"


def _by_task(forecast: Forecast, context: int) -> list[str]:
    head = "".join(f"{f'batch {batch}':>16}" for batch in forecast.batches)
    text = [
        f"expected speed-up of the best choice after {context:,} tokens, by roofline",
        f"  {'':<12}{head}",
    ]
    for task in forecast.tasks:
        cells = [_choice(forecast.best(task, batch, context)) for batch in forecast.batches]
        text.append(f"  {task:<12}" + "".join(f"{cell:>16}" for cell in cells))
    return text


def _choice(choice: ExpectedSpeedup | None) -> str:
    return f"{choice.speedup:.2f}× {choice.strategy}" if choice else "does not fit"


def _averages(forecast: Forecast, contexts: Sequence[int]) -> list[str]:
    if not forecast.tasks:
        return ["no expected speed-ups: no strategy has known acceptance"]
    head = "".join(f"{f'batch {batch}':>10}" for batch in forecast.batches)
    text = ["expected mean speed-up over the tasks, by roofline; * marks the best choice"]
    losing = []
    for context in contexts:
        text.append(f"  {f'after {context:,} tokens':<22}{head}")
        for name in forecast.strategies:
            means = [forecast.mean(name, batch, context) for batch in forecast.batches]
            if name == PLAIN or name not in forecast.tokens:
                continue
            cells = []
            for batch, mean in zip(forecast.batches, means, strict=True):
                best = forecast.best_on_average(batch, context)
                mark = "*" if best and best[0] == name else " "
                cells.append(f"{'–' if mean is None else f'{mean:.2f}×'}{mark}")
                losing += _slower(forecast, name, batch, context)
            text.append(f"    {name:<20}" + "".join(f"{cell:>10}" for cell in cells))
    for context in contexts:
        plain = [
            batch
            for batch in forecast.batches
            if (best := forecast.best_on_average(batch, context)) and best[0] == PLAIN
        ]
        if plain:
            losing.append(
                f"after {context:,} tokens drafting is not expected to pay on average at batch "
                + ", ".join(map(str, plain))
            )
    return [*text, *losing]


def _slower(forecast: Forecast, name: str, batch: int, context: int) -> list[str]:
    """Returns one line with the tasks that a strategy slows down; empty if there are none."""
    choices = {task: forecast.expected(name, task, batch, context) for task in forecast.tasks}
    slow = [
        f"{task} ({choice.speedup:.2f}×)"
        for task, choice in choices.items()
        if choice and choice.speedup < 1
    ]
    if not slow:
        return []
    where = f"at batch {batch} after {context:,} tokens on {', '.join(slow)}"
    return [f"{name} is expected to be SLOWER than plain decoding {where}"]


def _unknown(forecast: Forecast, contexts: Sequence[int]) -> list[str]:
    """Formats the acceptance that strategies of unknown acceptance would need."""
    names = [name for name in forecast.strategies if name != PLAIN and name not in forecast.tokens]
    if not names:
        return []
    head = "".join(f"{f'batch {batch}':>16}" for batch in forecast.batches)
    text = [
        "",
        "expected τ (mean acceptance length) needed to equal plain decoding / the best choice, for "
        "strategies of unknown acceptance",
    ]
    for context in contexts:
        text.append(f"  {f'after {context:,} tokens':<22}{head}")
        for name in names:
            cells = []
            for batch in forecast.batches:
                even = forecast.needed_tokens(name, batch, context)
                best = forecast.best_on_average(batch, context) if forecast.tasks else None
                other = f" / {even * best[1]:.2f}" if even and best else ""
                cells.append(f"{even:.2f}{other}" if even else "–")
            text.append(f"    {name:<20}" + "".join(f"{cell:>16}" for cell in cells))
    return text
