"""The forecast command: compiles every strategy, joins the costs with acceptance, and reports."""

import json
from collections.abc import Mapping, Sequence

from dflash.compiler import compile_points, compile_run, forecast_table, topology
from dflash.compiler.compile_points import PointSpec
from dflash.compiler.forecast import PLAIN, Forecast, StrategyPoint
from dflash.compiler.topology import TpuMachine
from dflash.config.schema import MeshConfig, subset
from dflash.config.tpu_schema import CompileDecode
from dflash.measure import acceptance, plots, published, table
from dflash.measure.acceptance import ExpectedAcceptance
from dflash.runs.display import Display
from dflash.storage import files, paths


def run(config: CompileDecode, workdir: str | None = None) -> Forecast:
    """Forecasts the speed-ups of a config's strategies, prints them and writes them.

    Args:
      config: Decoding config with the strategies, batch sizes and contexts to compare.
      workdir: Directory for `forecast.json`, `config.yml`, the plots and the compiled points; a
        later run reuses these points. None writes nothing.
    Raises:
      UserError: The config, the acceptance file or the TPU compiler is unusable.
    """
    histograms = acceptance.read(config.forecast.acceptance)
    specs = compile_points.point_specs(config)
    topology.prepare_environment()
    directory = paths.to_path(workdir) if workdir else None
    with Display().progress("compiling", every_s=0) as progress, files.explained(directory):
        machine = topology.find_machine(config)
        specs = compile_points.by_choice(specs, machine)
        points = compile_points.compile_points(specs, machine, directory, progress)
    shapes = {
        spec.name: _shape(spec, points[spec.name, spec.batch])
        for spec in specs
        if spec.strategy != PLAIN and points[spec.name, spec.batch].rows > 1 and not spec.divides
    }
    expected = acceptance.expected(histograms, shapes, config.drafter.name)
    chip = machine.topology.chip
    tokens = {name: strategy.tokens for name, strategy in expected.items()}
    forecast = Forecast(points, tokens, chip.hbm_gb * 1e9 / chip.devices)
    contexts = sorted(set(config.forecast.contexts))
    text = [
        *table.wrapped([_machine_line(machine, config)]),
        *forecast_table.lines(forecast, contexts),
        *(_beside_published(forecast, expected, contexts[0]) if chip.name == "v5p" else ()),
        "",
        *table.wrapped(
            f"acceptance of {name}: {strategy.source}" for name, strategy in expected.items()
        ),
    ]
    print("\n".join(text), flush=True)
    if directory:
        content = forecast_table.to_json(forecast, contexts)
        content |= {"acceptance": {name: strategy.source for name, strategy in expected.items()}}
        results = {"forecast.json": json.dumps(content, indent=1), **_plots(forecast, contexts)}
        compile_run.write(config, directory, results)
    return forecast


def _shape(spec: PointSpec, point: StrategyPoint) -> acceptance.DraftShape:
    tree = getattr(spec.drafter, "tree", None)
    return acceptance.DraftShape(spec.drafter.name, point.rows, tree and tree.budget)


def _machine_line(machine: TpuMachine, config: CompileDecode) -> str:
    sizes = subset(config.mesh, MeshConfig)
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
    chips = machine.topology
    name = f"{chips.slices} × {chips.name}" if chips.slices > 1 else chips.name
    return f"{name}, mesh {axes}; {forecast_table.LABEL}"


def _beside_published(
    forecast: Forecast, expected: Mapping[str, ExpectedAcceptance], context: int
) -> list[str]:
    """Compares the forecast with published measurements of the same models on TPU v5p.

    Returns:
      The comparison as lines of text; empty unless the smallest batch is 1 and a strategy has the
      block size and the acceptance of the published ones.
    """
    for name, strategy in expected.items():
        rows = forecast.points[name, forecast.batches[0]].rows
        if strategy.published and strategy.longest == rows and forecast.batches[0] == 1:
            plain, own = (forecast.points[which, 1].cost(context) for which in (PLAIN, name))
            times = (
                published.CycleTimes(plain.roofline_ms, own.roofline_ms),
                published.CycleTimes(plain.cycles_ms, own.cycles_ms),
            )
            heading = f"{name}, batch 1, after {context:,} tokens"
            return ["", *published.beside(heading, strategy.tokens, *times)]
    return []


def _plots(forecast: Forecast, contexts: Sequence[int]) -> dict[str, bytes]:
    """Plots speed-up over batch size for each context, by strategy and by task.

    Returns:
      PNG files by name; empty if no acceptance is known.
    """
    images = {}
    batches = forecast.batches
    for context in contexts if forecast.tasks else ():
        means = {
            name: [forecast.mean(name, batch, context) for batch in batches]
            for name in forecast.tokens
        }
        best = {
            task: [_best_speedup(forecast, task, batch, context) for batch in batches]
            for task in forecast.tasks
        }
        for kind, title, curves in (
            ("strategies", f"Expected speed-up, mean over tasks, after {context:,} tokens", means),
            ("tasks", f"Expected speed-up, best choice, after {context:,} tokens", best),
        ):
            lines = [_line(name, batches, speedups) for name, speedups in curves.items()]
            images[f"expected_{kind}_{context}.png"] = plots.curves(
                [line for line in lines if line.places],
                title=title,
                x="batch",
                y="speed-up over plain decoding",
                even=1.0,
                log="x",
                note=forecast_table.LABEL,
            )
    return images


def _best_speedup(forecast: Forecast, task: str, batch: int, context: int) -> float | None:
    choice = forecast.best(task, batch, context)
    return choice and choice.speedup


def _line(name: str, batches: Sequence[int], speedups: Sequence[float | None]) -> plots.Line:
    known = [pair for pair in zip(batches, speedups, strict=True) if pair[1]]
    return plots.Line(name, [batch for batch, _ in known], [speedup for _, speedup in known])
