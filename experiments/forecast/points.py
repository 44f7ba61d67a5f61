"""Costs of a cycle for a forecast, from one small compilation per strategy and batch size.

Three simplifications keep a compilation small. Each is exact or nearly so:
docs/results/tpu_compile.md compares them with whole programs.
  * Layers: if all layers are alike, only two layers of the target and of a randomly initialized
    drafter are compiled, and the costs of attention and MLP are multiplied.
  * Context: the attention kernels state the cost of full caches, which is linear in the context, so
    one program covers every context. Draft layers with a window stop there.
  * Branches: the sampling parameters are constants of the program, and a single cycle is compiled
    instead of a loop over cycles, so XLA drops the branches that no sequence takes.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.compiler import costs, hlo, programs
from dflash.compiler.costs import ScheduledOperation
from dflash.compiler.report import RunAssumptions
from dflash.compiler.topology import TpuMachine
from dflash.config.schema import DrafterConfig
from dflash.inference.cycle import cycle
from dflash.inference.engine import Engine
from dflash.inference.logits import controls
from dflash.inference.request import Request, RequestSampling
from dflash.loading import models
from dflash.loading.decode_plan import device_bytes
from dflash.models.decoder import Decoder
from dflash.storage import files
from dflash.version import __version__
from experiments.forecast import costs as forecast
from experiments.forecast.costs import (
    PLAIN,
    CompiledCost,
    DeviceMemory,
    LayerRepeats,
    StrategyPoint,
)
from experiments.forecast.schema import ForecastRun

# Capacity of the caches in tokens. Costs are linear in it, so any small value works.
_CAPACITY = 1024
_LAYERS = 2
_NOTHING = CompiledCost({}, 0.0)
_FOLDER = "points"


@dataclasses.dataclass(frozen=True)
class PointSpec:
    """Strategy and batch size of a point to compile.

    Attributes:
      config: Config of the forecast.
      strategy: Name of the strategy.
      drafter: Config of the strategy.
      batch: Number of sequences.
    """

    config: ForecastRun
    strategy: str
    drafter: DrafterConfig
    batch: int

    @property
    def file(self) -> str:
        """Returns the name of the file that keeps the point."""
        return f"{self.strategy}-{self.batch}-{self.key}.json"

    @property
    def key(self) -> str:
        """Returns a hash of everything that the figures of the point depend on."""
        tpu = self.config.tpu
        run = dataclasses.replace(self.config, drafter=self.drafter, strategies={})
        facts = dataclasses.asdict(run)
        for name in ("prompts", "tpu", "forecast", "strategies"):
            del facts[name]
        versions = [*map(importlib.metadata.version, ("jax", "libtpu")), __version__]
        facts |= {"machine": (tpu.topology, tpu.slices), "batch": self.batch, "versions": versions}
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def point_specs(config: ForecastRun) -> list[PointSpec]:
    """Returns the points of a forecast: plain decoding and every strategy, at every batch size.

    Raises:
      ConfigError: A list is empty, or a strategy has the reserved name of plain decoding.
    """
    for key in ("batches", "contexts"):
        if not getattr(config.forecast, key):
            raise errors.ConfigError(f"forecast.{key}: expected at least one number")
    strategies = dict(config.strategies)
    if not strategies and config.drafter.name != DrafterConfig.name:
        strategies = {config.drafter.name: config.drafter}
    if PLAIN in strategies:
        raise errors.ConfigError(
            f"strategies.{PLAIN}: this name is reserved for decoding without drafts; choose another"
        )
    drafters = {PLAIN: DrafterConfig(), **strategies}
    batches = sorted(set(config.forecast.batches))
    return [
        PointSpec(config, name, drafter, batch)
        for name, drafter in drafters.items()
        for batch in batches
    ]


def compile_points(
    specs: Sequence[PointSpec],
    machine: TpuMachine,
    workdir: pathlib.Path | None,
    progress: Callable[[str, float], None] = lambda title, fraction: None,
    compile_one: Callable[[PointSpec, TpuMachine], StrategyPoint] | None = None,
) -> dict[tuple[str, int], StrategyPoint]:
    """Compiles points, and reuses those that an earlier run wrote to the work directory.

    Args:
      specs: Points to compile.
      machine: Topology to compile for.
      workdir: Directory to which each point is written once it is compiled, or None.
      progress: Called before each compilation with its title and the fraction that is done.
      compile_one: Compiles a point; None is `compile_point`.
    Returns:
      Points by name and batch size.
    """
    compile_one = compile_one or compile_point
    points = {}
    for index, spec in enumerate(specs):
        path = workdir and workdir / _FOLDER / spec.file
        point = path and _read(path)
        if point is None:
            progress(f"{spec.strategy}, batch {spec.batch}", index / len(specs))
            point = compile_one(spec, machine)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(path, json.dumps(dataclasses.asdict(point), indent=1))
        # The strategy may have had another name when the point was compiled.
        points[spec.strategy, spec.batch] = dataclasses.replace(point, strategy=spec.strategy)
    return points


def _read(path: pathlib.Path) -> StrategyPoint | None:
    """Reads a point of an earlier run; None if there is no file or it is unusable."""
    try:
        return StrategyPoint.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def compile_point(spec: PointSpec, machine: TpuMachine) -> StrategyPoint:
    """Compiles a cycle with few layers and extrapolates to all layers and any context.

    Raises:
      ConfigError: The models do not fit each other or the mesh.
    """
    target, drafter = _models(spec.config, spec.drafter, machine)
    memory = _memory(target, drafter, spec)
    depth, (shallow, draft_repeats) = len(target.layers), _shallow(spec.drafter)
    target, drafter = _models(spec.config, shallow, machine)
    _truncate(target, drafter)
    engine = _engine(target, drafter, spec)
    block_size, mean_rows = engine.rules.choices.rows_of(0)
    compiled = _compile_cycle(engine, block_size, mean_rows)
    repeats = LayerRepeats(depth / len(target.layers), draft_repeats)
    module = hlo.parse(compiled.as_text())
    chip, rates = machine.topology.chip, machine.rates

    def cost(fill: float) -> tuple[CompiledCost, list[ScheduledOperation]]:
        assumptions = RunAssumptions.of(round(fill * _CAPACITY), engine.config)
        operations = costs.operations(module, trips=assumptions.trips, branch=assumptions.branch)
        return forecast.cost_of(operations, rates, chip, fill=fill, repeats=repeats), operations

    (empty, _), (full, at_full) = cost(0.0), cost(1.0)
    per_token = _NOTHING.plus(full.plus(empty, -1), 1 / _CAPACITY)
    in_windows = {}
    for window, kernels in forecast.by_window(at_full).items():
        of_window = forecast.cost_of(kernels, rates, chip, fill=1.0, repeats=repeats)
        in_windows[window] = _NOTHING.plus(of_window, 1 / _CAPACITY)
        per_token = per_token.plus(in_windows[window], -1)
    analysis = compiled.memory_analysis()
    extra = analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes
    return StrategyPoint(
        strategy=spec.strategy,
        batch=spec.batch,
        rows=mean_rows or block_size,
        fixed=empty,
        per_token=per_token,
        memory=DeviceMemory(memory.fixed + extra, memory.per_token),
        in_windows=in_windows,
    )


def _models(config: ForecastRun, drafting: DrafterConfig, machine: TpuMachine) -> tuple:
    return programs.decoding_models(config.target, drafting, config.dtype, machine.sharding)


def _shallow(config: DrafterConfig) -> tuple[DrafterConfig, float]:
    """Returns a drafter config with `_LAYERS` layers, and the ratio of its layers to those.

    A drafter with a checkpoint or with few layers is returned as it is, with ratio 1.
    """
    shape = getattr(config, "architecture", None)
    depth = getattr(shape, "num_hidden_layers", None) or 0
    if depth <= _LAYERS or getattr(config, "checkpoint", None) != models.RANDOM:
        return config, 1.0
    shape = dataclasses.replace(shape, num_hidden_layers=_LAYERS)
    return dataclasses.replace(config, architecture=shape), depth / _LAYERS


def _truncate(target: Decoder, drafter: Any) -> None:
    """Truncates the target to `_LAYERS` layers in place, unless its layers differ."""
    kinds = [nnx.split(layer)[0] for layer in target.layers]
    if len(kinds) <= _LAYERS or any(kind != kinds[0] for kind in kinds):
        return
    target.layers = nnx.List(list(target.layers)[:_LAYERS])
    taps = range(len(drafter.feature_layers))
    drafter.feature_layers = tuple(tap % _LAYERS for tap in taps)


def _engine(target: Decoder, drafter: Any, spec: PointSpec, capacity: int = _CAPACITY) -> Engine:
    decode = dataclasses.replace(spec.config.decode, batch_size=spec.batch, num_pages=None)
    divide_rows = spec.drafter.divides_rows
    return Engine(target, drafter, decode, max_length=capacity, divide_rows=divide_rows)


def _compile_cycle(engine: Engine, block_size: int, mean_rows: int | None) -> jax.stages.Compiled:
    def one_cycle(target, drafter, state):
        rows = {"block_size": block_size, "mean_rows": mean_rows}
        state = _as_configured(state, engine)
        return cycle.cycle(target, drafter, state, rules=engine.rules, **rows)

    engine.add_program("one_cycle", one_cycle)
    return engine.program("one_cycle")


def _as_configured(state, engine: Engine):
    """Replaces the sampling parameters and controls of a state by constants from the config."""
    config = engine.config
    request = Request(
        0, (), 1, RequestSampling.from_config(config), min_new_tokens=config.min_new_tokens
    )
    of_request = controls.of_request(request, (), engine.layout.max_length)

    def broadcast(array: jax.Array, value: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(value, array.dtype), array.shape)

    of_batch = dataclasses.replace(
        jax.tree.map(broadcast, state.controls, of_request), token_ids=state.controls.token_ids
    )
    sampling = state.sampling.filled(config)
    return dataclasses.replace(state, sampling=sampling, controls=of_batch)


def _memory(target: Decoder, drafter: Any, spec: PointSpec) -> DeviceMemory:
    """Measures weights and caches at full depth; two cache capacities give the bytes per token."""

    def caches(capacity: int) -> tuple[int, int]:
        engine = _engine(target, drafter, spec, capacity)
        state = engine.abstract_state()
        return engine.layout.capacity, device_bytes((state.cache, state.drafter))

    (capacity, size), (larger_capacity, larger_size) = caches(_CAPACITY), caches(2 * _CAPACITY)
    per_token = (larger_size - size) / (larger_capacity - capacity)
    weights = sum(device_bytes(nnx.state(model, nnx.Param)) for model in (target, drafter))
    return DeviceMemory(weights + size - capacity * per_token, per_token)
