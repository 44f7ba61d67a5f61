"""Costs of a cycle for `--forecast`: few compilations, each small, and none made twice.

Three savings, each exact or nearly so; docs/results/forecast.md compares them with whole programs.
  * Layers: where all are alike, two are compiled, of the target and of a drafter whose shape is the
    config's, and attention and mlp are multiplied up.
  * Context: the attention kernels state the cost of a context that fills their caches, and that is
    linear in it; so one program stands for every context.
  * Branches: how sequences draw is a constant of the program, and one cycle is compiled instead of
    a loop over cycles, so what no sequence takes is not compiled.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.compiler import components, costs, forecast, hlo, programs, topology
from dflash.compiler.components import ATTENTION, DRAFTER, MLP, UNEMBED
from dflash.compiler.costs import ScheduledOperation
from dflash.compiler.forecast import PLAIN, CycleCost, DeviceMemory, StrategyPoint
from dflash.compiler.report import RunAssumptions
from dflash.compiler.topology import RooflineRates, Topology
from dflash.config.schema import DrafterConfig
from dflash.config.tpu_schema import CompileDecode
from dflash.inference import controls, cycle
from dflash.inference.engine import Engine
from dflash.inference.request import Request, Sampling
from dflash.loading import decode_plan, models
from dflash.models.decoder import Decoder
from dflash.parallel.chips import Chip
from dflash.parallel.sharding import Sharding
from dflash.storage import files

# Tokens that the caches of a compiled program have room for; any will do, so they are few.
_CAPACITY = 1024
_LAYERS = 2
# Kernels whose cost is that of the context; see the `cost` of each.
_ATTENTION_KERNELS = ("paged_attention", "block_attention", "latent_attention")
_IN_LAYERS = "attention", "mlp"  # scopes of a layer's parts
_FOLDER = "points"


@dataclasses.dataclass(frozen=True)
class TpuMachine:
    """What a forecast compiles for.

    Attributes:
      topology: the chips.
      sharding: over them.
      rates: of the compiler's roofline.
    """

    topology: Topology
    sharding: Sharding
    rates: RooflineRates


@dataclasses.dataclass(frozen=True)
class LayerRepeats:
    """How often the compiled layers are repeated in a whole cycle: the target's, the drafter's."""

    target: float = 1.0
    drafter: float = 1.0

    def of(self, scope: str) -> float:
        """Of an operation of these jax scopes."""
        part = components.component_of(scope)
        if part in (ATTENTION, MLP):
            return self.target
        layer = part == DRAFTER and any(components.has_word(scope, word) for word in _IN_LAYERS)
        return self.drafter if layer else 1.0


@dataclasses.dataclass(frozen=True)
class PointSpec:
    """One point to be compiled: a strategy with so many sequences."""

    config: CompileDecode
    strategy: str
    drafter: DrafterConfig
    batch: int

    @property
    def key(self) -> str:
        """A hash of all that its figures depend on."""
        tpu = self.config.tpu
        run = dataclasses.replace(self.config, drafter=self.drafter, strategies={})
        facts = dataclasses.asdict(run)
        for name in ("prompts", "tpu", "forecast", "strategies"):
            del facts[name]
        versions = [importlib.metadata.version(name) for name in ("jax", "libtpu", "dflash")]
        facts |= {"machine": (tpu.topology, tpu.slices), "batch": self.batch, "versions": versions}
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


Compile = Callable[[PointSpec, TpuMachine], StrategyPoint]


def point_specs(config: CompileDecode) -> list[PointSpec]:
    """What a forecast compiles: plain decoding and every strategy, at every batch.

    Raises:
      ConfigError: a name or a list is unusable.
    """
    for key in ("batches", "contexts"):
        if not getattr(config.forecast, key):
            raise errors.ConfigError(f"forecast.{key}: expected at least one number")
    strategies = dict(config.strategies)
    if not strategies and config.drafter.name != DrafterConfig.name:
        strategies = {config.drafter.name: config.drafter}
    if PLAIN in strategies:
        raise errors.ConfigError(
            f"strategies.{PLAIN}: the name of decoding without drafts; choose another"
        )
    everything = {PLAIN: DrafterConfig(), **strategies}
    batches = sorted(set(config.forecast.batches))
    return [
        PointSpec(config, name, drafter, batch) for name, drafter in everything.items()
        for batch in batches
    ]  # fmt: skip


def find_machine(config: CompileDecode) -> TpuMachine:
    """The machine of a run; asks the compiler for its rates."""
    found = topology.find(config.tpu.topology, config.tpu.slices)
    mesh = dataclasses.asdict(config.mesh)
    sharding = topology.make_sharding(found, mesh, config.sharding_rules)
    return TpuMachine(found, sharding, topology.compiler_rates(found))


def compile_points(
    wanted: Sequence[PointSpec],
    machine: TpuMachine,
    workdir: pathlib.Path | None,
    progress: Callable[[str, float], None] = lambda what, done: None,
    compile_one: Compile | None = None,
) -> dict[tuple[str, int], StrategyPoint]:
    """Compiles points, those that the work directory holds apart.

    Args:
      wanted: points.
      machine: to compile for.
      workdir: where every point is written when it is done; None: nowhere.
      progress: called before each point, with words and the share that is done.
      compile_one: compiles a point; None: `compile_point`.
    """
    compile_one = compile_one or compile_point
    found = {}
    for number, spec in enumerate(wanted):
        path = workdir and workdir / _FOLDER / f"{spec.strategy}-{spec.batch}-{spec.key}.json"
        point = path and _read(path)
        if point is None:
            progress(f"{spec.strategy}, batch {spec.batch}", number / len(wanted))
            point = compile_one(spec, machine)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(path, json.dumps(dataclasses.asdict(point), indent=1))
        # The same program may go by another name than when it was compiled.
        found[spec.strategy, spec.batch] = dataclasses.replace(point, strategy=spec.strategy)
    return found


def _read(path: pathlib.Path) -> StrategyPoint | None:
    """A point of an earlier run; None if there is none, or none that can be used."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        costs = {name: CycleCost(**value.pop(name)) for name in ("fixed", "per_token")}
        moved = {kind: tuple(sums) for kind, sums in value["collectives"].items()}
        rest = {"memory": DeviceMemory(**value["memory"]), "collectives": moved}
        return StrategyPoint(**value | costs | rest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def compile_point(spec: PointSpec, machine: TpuMachine) -> StrategyPoint:
    """Compiles one cycle, few layers deep, and reads what a whole one costs in any context.

    Raises:
      ConfigError: models that do not fit each other, or the mesh.
    """
    target, drafter = programs.decoding_models(spec.config, spec.drafter, machine.sharding)
    memory = _memory(target, drafter, spec)
    depth, (shallow, draft_repeats) = len(target.layers), _shallow(spec.drafter)
    target, drafter = programs.decoding_models(spec.config, shallow, machine.sharding)
    _cut(target, drafter)
    engine = _engine(target, drafter, spec)
    compiled = _compile_cycle(engine)
    repeats = LayerRepeats(depth / len(target.layers), draft_repeats)
    module = hlo.parse(compiled.as_text())
    chip, rates = machine.topology.chip, machine.rates

    def cost(share: float) -> tuple[CycleCost, list[ScheduledOperation]]:
        assumptions = RunAssumptions.of(round(share * _CAPACITY), engine.config)
        found = costs.operations(module, trips=assumptions.trips, branch=assumptions.branch)
        return cost_of(found, rates, chip, share=share, repeats=repeats), found

    (empty, found), (full, _) = cost(0.0), cost(1.0)
    per_token = CycleCost({}, 0.0).plus(full.plus(empty, -1), 1 / _CAPACITY)
    analysis = compiled.memory_analysis()
    extra = analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes
    return StrategyPoint(
        strategy=spec.strategy,
        batch=spec.batch,
        rows=drafter.block_size,
        fixed=empty,
        per_token=per_token,
        memory=DeviceMemory(memory.fixed + extra, memory.per_token),
        collectives=_collectives(found, repeats),
    )


def cost_of(
    operations: Iterable[ScheduledOperation],
    rates: RooflineRates,
    chip: Chip,
    *,
    share: float,
    repeats: LayerRepeats,
) -> CycleCost:
    """Adds up operations by what limits them.

    Args:
      operations: of one cycle.
      rates: of the compiler's roofline.
      chip: whose clock turns cycles into time.
      share: of the context for which attention kernels state their cost.
      repeats: of layers.
    """
    limits, cycles_ms = dict.fromkeys(forecast.LIMITS, 0.0), 0.0
    for one in operations:
        part = components.component_of(one.scope)
        times = one.times * repeats.of(one.scope) * (share if _reads_context(one) else 1)
        took_ms = times * components.roofline_ms(one, rates)
        limits[_limit(one, part, rates)] += took_ms
        if one.cycles and chip.clock_ghz:
            cycles_ms += times * one.cycles / (chip.clock_ghz * 1e6)
        elif one.instruction.opcode == "custom-call" and chip.clock_ghz:
            cycles_ms += took_ms
    return CycleCost(limits, cycles_ms)


def _limit(one: ScheduledOperation, part: str, rates: RooflineRates) -> str:
    if one.flops / rates.flops_per_s > one.hbm_bytes / rates.bytes_per_s:
        return forecast.ARITHMETIC
    if _reads_context(one):
        return forecast.CONTEXT
    if part == UNEMBED:
        return forecast.HEAD
    return forecast.WEIGHTS if part in (ATTENTION, MLP, DRAFTER) else forecast.REST


def _reads_context(one: ScheduledOperation) -> bool:
    instruction = one.instruction
    return instruction.opcode == "custom-call" and instruction.name.startswith(_ATTENTION_KERNELS)


def _collectives(
    found: Iterable[ScheduledOperation], repeats: LayerRepeats
) -> dict[str, tuple[float, float]]:
    """By kind, how many a whole cycle runs, and their bytes."""
    sums: dict[str, tuple[float, float]] = {}
    for one in found:
        for kind, (count, size) in components.collectives([one]).items():
            times, (so_far, bytes_so_far) = repeats.of(one.scope), sums.get(kind, (0, 0))
            sums[kind] = so_far + times * count, bytes_so_far + times * size
    return sums


def _shallow(config: DrafterConfig) -> tuple[DrafterConfig, float]:
    """The drafter with fewer layers, and how often they are repeated; itself if it has no more."""
    shape = getattr(config, "architecture", None)
    depth = getattr(shape, "num_hidden_layers", None) or 0
    if depth <= _LAYERS or getattr(config, "checkpoint", None) != models.RANDOM:
        return config, 1.0
    shape = dataclasses.replace(shape, num_hidden_layers=_LAYERS)
    return dataclasses.replace(config, architecture=shape), depth / _LAYERS


def _cut(target: Decoder, drafter: Any) -> None:
    """Leaves few layers of a target, in place; all where they are not alike."""
    kinds = [nnx.split(layer)[0] for layer in target.layers]
    if len(kinds) <= _LAYERS or any(kind != kinds[0] for kind in kinds):
        return
    target.layers = nnx.List(list(target.layers)[:_LAYERS])
    taps = range(len(drafter.feature_layers))
    drafter.feature_layers = tuple(tap % _LAYERS for tap in taps)


def _engine(target: Decoder, drafter: Any, spec: PointSpec, capacity: int = _CAPACITY) -> Engine:
    decode = dataclasses.replace(spec.config.decode, batch_size=spec.batch, num_pages=None)
    return Engine(target, drafter, decode, max_length=capacity)


def _compile_cycle(engine: Engine) -> jax.stages.Compiled:
    def one_cycle(target, drafter, state):
        state = _as_configured(state, engine)
        return cycle.cycle(
            target, drafter, state, rules=engine.rules, block_size=drafter.block_size
        )

    engine.add_program("one_cycle", one_cycle)
    return engine.program("one_cycle")


def _as_configured(state, engine: Engine):
    """The state of sequences that draw as the config says, which become constants."""
    config = engine.config
    request = Request(0, (), 1, Sampling.from_config(config), min_new_tokens=config.min_new_tokens)
    asked = controls.of_request(request, (), engine.layout.max_length)

    def every(one: jax.Array, value: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(value, one.dtype), one.shape)

    asked = dataclasses.replace(
        jax.tree.map(every, state.controls, asked), text=state.controls.text
    )
    sampling = state.sampling.filled(config)
    return dataclasses.replace(state, sampling=sampling, controls=asked)


def _memory(target: Decoder, drafter: Any, spec: PointSpec) -> DeviceMemory:
    """Of weights and caches at full depth; caches are linear in their room."""

    def caches(capacity: int) -> tuple[int, int]:
        engine = _engine(target, drafter, spec, capacity)
        state = engine.abstract_state()
        return engine.layout.capacity, decode_plan.measure(
            (state.cache, state.drafter)
        ).device_bytes

    (room, small), (more_room, large) = caches(_CAPACITY), caches(2 * _CAPACITY)
    per_token = (large - small) / (more_room - room)
    held = sum(
        decode_plan.measure(nnx.state(one, nnx.Param)).device_bytes for one in (target, drafter)
    )
    return DeviceMemory(held + small - room * per_token, per_token)


def to_json(points: Mapping[tuple[str, int], StrategyPoint]) -> list[dict[str, Any]]:
    """The points as plain numbers."""
    return [dataclasses.asdict(point) for point in points.values()]
