"""Forecasts the cost of a cycle by strategy, batch size and context, by the TPU compiler.

python -m experiments.forecast experiments/forecast/qwen3_4b.yml --workdir runs/forecast
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from dflash.cli import subcommand as cli
from dflash.compiler import compile_run, topology
from dflash.compiler.topology import TpuMachine
from dflash.measure import table
from dflash.runs import frame
from experiments.forecast import points as compile_points
from experiments.forecast.costs import CompiledCost, Forecast
from experiments.forecast.schema import ForecastRun

LABEL = "the compiler's costs, not measured; drafting pays where τ exceeds “× plain”"
_SHORT = {"output head": "head"}


SUBCOMMAND = cli.Subcommand(
    "forecast",
    "Reports the cost of a cycle of each of the config's strategies, by batch and context, for a "
    "TPU topology; continues in --workdir.",
    schema=ForecastRun,
    shared=("workdir", "print_config", "compilation_cache"),
)


def run(config: ForecastRun, workdir: str | None = None) -> Forecast:
    """Forecasts the costs of a config's strategies, prints them and writes them.

    Args:
      config: Decoding config with the strategies, batch sizes and contexts to compare.
      workdir: Directory for `forecast.json`, `config.yml` and the compiled points; a later run
        reuses these points. None writes nothing.
    Raises:
      UserError: The config or the TPU compiler is unusable.
    """
    specs = compile_points.point_specs(config)
    topology.prepare_environment()
    directory = compile_run.open_directory(workdir, config)
    contexts = sorted(set(config.forecast.contexts))
    with frame.open_run(directory) as display:
        with display.progress("compiling", every_s=0) as progress:
            machine = topology.find_machine(config)
            points = compile_points.compile_points(specs, machine, directory.path, progress)
        chip = machine.topology.chip
        forecast = Forecast(points, chip.hbm_gb * 1e9 / chip.devices)
        directory.write_json("forecast.json", to_json(forecast, contexts))
    text = [*table.wrapped([_machine_line(machine, config)]), *lines(forecast, contexts)]
    print("\n".join(text), flush=True)
    return forecast


def _machine_line(machine: TpuMachine, config: ForecastRun) -> str:
    sizes = dataclasses.asdict(config.mesh)
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
    chips = machine.topology
    name = f"{chips.slices} × {chips.name}" if chips.slices > 1 else chips.name
    return f"{name}, mesh {axes}; {LABEL}"


def lines(forecast: Forecast, contexts: Sequence[int]) -> list[str]:
    """Returns a table of the costs for each context, as lines of text."""
    return [line for context in contexts for line in ("", *_costs(forecast, context))]


def _costs(forecast: Forecast, context: int) -> Iterator[str]:
    yield f"expected cost of a cycle after {context:,} tokens, ms"
    yield (
        f"  {'batch':>5}  {'strategy':<12}{'rows':>5}{'roofline':>10}{'cycles':>9}{'× plain':>9}"
        f"  {'limited by':<18}{'memory':>9}"
    )
    for point in sorted(forecast.points.values(), key=lambda point: (point.batch, point.rows)):
        cost = point.cost(context)
        cycles = f"{cost.cycles_ms:.2f}" if cost.cycles_ms else "–"
        memory = f"{point.memory.at(context + point.rows) / 1e9:.1f} GB"
        if not forecast.fits(point, context):
            memory += ": does NOT fit"
        yield (
            f"  {point.batch:>5}  {point.strategy:<12}{point.rows:>5}{cost.roofline_ms:>10.2f}"
            f"{cycles:>9}{forecast.over_plain(point, context):>9.2f}"
            f"  {_limit(cost):<18}{memory:>9}"
        )


def _limit(cost: CompiledCost) -> str:
    name, fraction = cost.bottleneck
    return f"{_SHORT.get(name, name)} {100 * fraction:.0f} %"


def to_json(forecast: Forecast, contexts: Sequence[int]) -> dict[str, Any]:
    """Returns the forecast as JSON values: times in ms and sizes in bytes, per device."""
    cells = [
        {
            "strategy": point.strategy,
            "batch": point.batch,
            "context": context,
            "rows": point.rows,
            "roofline_ms": point.cost(context).roofline_ms,
            "cycles_ms": point.cost(context).cycles_ms or None,
            "over_plain": forecast.over_plain(point, context),
            "limits_ms": dict(point.cost(context).limits),
            "memory_bytes": point.memory.at(context + point.rows),
            "fits": forecast.fits(point, context),
        }
        for point in forecast.points.values()
        for context in contexts
    ]
    return {
        "label": LABEL,
        "capacity_bytes": forecast.capacity_bytes,
        "points": [dataclasses.asdict(point) for point in forecast.points.values()],
        "cells": cells,
    }


main = cli.entry_point(SUBCOMMAND, lambda command: run(command.config, command.workdir) and None)

if __name__ == "__main__":
    main()
