"""A forecast as text and as plain numbers. Every heading says that its figures are expected."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dflash.compiler import compile_points
from dflash.compiler.forecast import PLAIN, CycleCost, ExpectedSpeedup, Forecast

LABEL = "expected, not measured: the compiler's costs joined with known acceptance"
_SHORT = {"output head": "head"}


def lines(found: Forecast, contexts: Sequence[int]) -> list[str]:
    """Costs, speed-ups by task, the best choice, and what cannot be said, a line each.

    Args:
      found: the forecast.
      contexts: tokens of each sequence.
    """
    text = []
    for context in contexts:
        text += ["", *_costs(found, context)]
    for context in contexts if found.tasks else ():
        text += ["", *_by_task(found, context)]
    return [*text, "", *_averages(found, contexts), *_unknown(found, contexts)]


def to_json(found: Forecast, contexts: Sequence[int]) -> dict[str, Any]:
    """The same as plain numbers; times in ms, sizes in bytes, per device."""
    cells = []
    for (name, batch), point in found.points.items():
        for context in contexts:
            cost = point.cost(context)
            expected = {task: found.expected(name, task, batch, context) for task in found.tasks}
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
                    "fits": found.fits(name, batch, context),
                    "expected": {
                        task: dataclasses.asdict(one) for task, one in expected.items() if one
                    },
                }
            )
    best = [
        {"task": task, "batch": batch, "context": context, **_asdict(one)}
        for context in contexts
        for batch in found.batches
        for task in found.tasks
        if (one := found.best(task, batch, context))
    ]
    return {
        "label": LABEL,
        "capacity_bytes": found.capacity_bytes,
        "points": compile_points.to_json(found.points),
        "cells": cells,
        "best": best,
    }


def _asdict(choice: ExpectedSpeedup) -> dict[str, Any]:
    return dataclasses.asdict(choice)


def _costs(found: Forecast, context: int) -> list[str]:
    text = [
        f"expected cost of a cycle after {context:,} tokens, ms",
        f"  {'batch':>5}  {'strategy':<12}{'rows':>5}{'roofline':>10}{'cycles':>9}{'× plain':>9}"
        f"  {'limited by':<18}{'memory':>9}",
    ]
    for batch in found.batches:
        plain = found.points[PLAIN, batch].cost(context)
        for name in found.strategies:
            point = found.points[name, batch]
            cost = point.cost(context)
            gigabytes = point.memory.at(context + point.rows) / 1e9
            room = f"{gigabytes:.1f} GB"
            if not found.fits(name, batch, context):
                room += ": does NOT fit"
            text.append(
                f"  {batch:>5}  {name:<12}{point.rows:>5}{cost.roofline_ms:>10.2f}"
                f"{_number(cost.cycles_ms):>9}{cost.roofline_ms / plain.roofline_ms:>9.2f}"
                f"  {_limit(cost):<18}{room:>9}"
            )
    return text


def _limit(cost: CycleCost) -> str:
    name, share = cost.largest
    return f"{_SHORT.get(name, name)} {100 * share:.0f} %"


def _number(value: float | None) -> str:
    return f"{value:.2f}" if value else "–"


def _by_task(found: Forecast, context: int) -> list[str]:
    head = "".join(f"{f'batch {batch}':>16}" for batch in found.batches)
    text = [
        f"expected speed-up of the best choice after {context:,} tokens, by roofline",
        f"  {'':<12}{head}",
    ]
    for task in found.tasks:
        cells = [_choice(found.best(task, batch, context)) for batch in found.batches]
        text.append(f"  {task:<12}" + "".join(f"{cell:>16}" for cell in cells))
    return text


def _choice(one: ExpectedSpeedup | None) -> str:
    return f"{one.speedup:.2f}× {one.strategy}" if one else "does not fit"


def _averages(found: Forecast, contexts: Sequence[int]) -> list[str]:
    if not found.tasks:
        return ["no expected speed-ups: nothing is known of any strategy's acceptance"]
    head = "".join(f"{f'batch {batch}':>10}" for batch in found.batches)
    text = ["expected speed-up on average over the tasks, by roofline; * the best choice"]
    losing = []
    for context in contexts:
        text.append(f"  {f'after {context:,} tokens':<22}{head}")
        for name in found.strategies:
            means = [found.mean(name, batch, context) for batch in found.batches]
            if name == PLAIN or name not in found.tokens:
                continue
            cells = []
            for batch, mean in zip(found.batches, means, strict=True):
                best = found.best_on_average(batch, context)
                mark = "*" if best and best[0] == name else " "
                cells.append(f"{'–' if mean is None else f'{mean:.2f}×'}{mark}")
                losing += _slower(found, name, batch, context)
            text.append(f"    {name:<20}" + "".join(f"{cell:>10}" for cell in cells))
    for context in contexts:
        plain = [
            batch
            for batch in found.batches
            if (best := found.best_on_average(batch, context)) and best[0] == PLAIN
        ]
        if plain:
            losing.append(
                f"after {context:,} tokens no drafting is expected to pay on average at batch "
                + ", ".join(map(str, plain))
            )
    return [*text, *losing]


def _slower(found: Forecast, name: str, batch: int, context: int) -> list[str]:
    """The tasks on which a strategy is expected to lose, as a line; none if there are none."""
    expected = {task: found.expected(name, task, batch, context) for task in found.tasks}
    slow = [f"{task} ({one.speedup:.2f}×)" for task, one in expected.items()
            if one and one.speedup < 1]  # fmt: skip
    if not slow:
        return []
    where = f"at batch {batch} after {context:,} tokens on {', '.join(slow)}"
    return [f"{name} is expected to be SLOWER than plain decoding {where}"]


def _unknown(found: Forecast, contexts: Sequence[int]) -> list[str]:
    """For strategies of which no acceptance is known: what they would need."""
    names = [name for name in found.strategies if name != PLAIN and name not in found.tokens]
    if not names:
        return []
    head = "".join(f"{f'batch {batch}':>16}" for batch in found.batches)
    text = [
        "",
        "expected τ needed to equal plain decoding / the best choice on average, where no "
        "acceptance is known",
    ]
    for context in contexts:
        text.append(f"  {f'after {context:,} tokens':<22}{head}")
        for name in names:
            cells = []
            for batch in found.batches:
                even = found.needed_tokens(name, batch, context)
                best = found.best_on_average(batch, context) if found.tasks else None
                other = f" / {even * best[1]:.2f}" if best else ""
                cells.append(f"{even:.2f}{other}")
            text.append(f"    {name:<20}" + "".join(f"{cell:>16}" for cell in cells))
    return text
