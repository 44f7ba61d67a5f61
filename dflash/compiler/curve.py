"""The cost of verifying R rows at once: flat while weights stream, rising past the ridge.

Two layers of the target are compiled with its head, and scaled to the target's depth.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.compiler import components, costs, hlo, programs, topology
from dflash.compiler.components import ATTENTION, MLP, Component
from dflash.compiler.report import RunAssumptions
from dflash.compiler.topology import RooflineRates, Topology
from dflash.config.schema import DecodeConfig
from dflash.layers.linear import matmul_precision
from dflash.loading import models, weights
from dflash.parallel.chips import Chip

_LAYERS = 2
# Cost over that of a single row from which on the curve is no longer flat.
_FLAT = 1.1


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One forward of the target over `rows` rows of a sequence, per device."""

    rows: int
    cost: Component


def compile_curve(
    config: Any,
    rows: Sequence[int],
    machine: Topology,
    rates: RooflineRates,
    progress: Callable[[str, float], None] = lambda what, done: None,
    keep: Callable[[Sequence[CurvePoint]], None] = lambda points: None,
) -> list[CurvePoint]:
    """Compiles a forward for each number of rows.

    Args:
      config: of the run.
      rows: numbers of rows, all of one sequence.
      machine: to compile for.
      rates: of its compiler's roofline.
      progress: called before each number of rows, with words and the share that is done.
      keep: called after each with the points so far.
    Raises:
      ConfigError: the target's shape is not in the config.
    """
    if not rows:
        return []
    shape = config.target.architecture
    if shape is None:
        raise errors.ConfigError("--rows: target.architecture must be given")
    mesh = dataclasses.asdict(config.mesh)
    sharding = topology.make_sharding(machine, mesh, config.sharding_rules)
    shallow = dataclasses.replace(shape, num_hidden_layers=_LAYERS)
    group = dataclasses.replace(config.target, checkpoint=models.RANDOM, architecture=shallow)
    source = models.find_target(group)
    dtype = getattr(config, "dtype", "bfloat16")
    target = models.build_target(group, source, dtype=dtype, sharding=sharding)
    weights.arrange(target, sharding)
    points = []
    for count in rows:
        progress(f"{count} rows", len(points) / len(rows))
        cost = _cost(target, count, config, machine.chip, rates, shape.num_hidden_layers)
        points.append(CurvePoint(count, cost))
        keep(points)
    return points


def _cost(target, rows: int, config, chip: Chip, rates, depth: int) -> Component:
    decode: DecodeConfig = getattr(config, "decode", None) or DecodeConfig()
    context = config.tpu.context or (decode.max_length or decode.prefill_chunk)
    pages = -(-(context + rows) // decode.page_size)
    cache = target.new_cache(
        batch=1,
        pages_per_sequence=pages,
        num_pages=pages + 1,
        page_size=decode.page_size,
        kv_dtype=decode.kv_dtype,
    )
    graph, params = nnx.split(target)
    tokens = target.sharding.abstract((1, rows), (None, None), jnp.int32)

    def verify(params, tokens, positions, cache):
        model = nnx.merge(graph, params)
        with jax.named_scope("target"):
            output = model(tokens, positions, cache)
        return jnp.argmax(model.unembed(output.hidden), axis=-1), output.cache

    with jax.default_matmul_precision(matmul_precision(target.dtype)):
        jitted = jax.jit(verify, donate_argnums=3)
        compiled = jitted.lower(params, tokens, tokens, cache).compile()
    assumptions = RunAssumptions(context)
    module = hlo.parse(compiled.as_text())
    found = costs.operations(module, trips=assumptions.trips, branch=assumptions.branch)
    ideals = programs.target_ideals(target, rows, context, cache)
    return at_depth(components.summarize(found, ideals, chip, rates), depth)


def at_depth(parts: Mapping[str, Component], depth: int) -> Component:
    """The sum of a target's components at `depth` layers, given those of one with `_LAYERS`."""
    repeats = {ATTENTION: depth / _LAYERS, MLP: depth / _LAYERS}
    return components.total(
        components.scaled(part, repeats.get(name, 1)) for name, part in parts.items()
    )


def lines(points: Sequence[CurvePoint], chip: Chip) -> list[str]:
    """The curve as text; empty without points."""
    if not points:
        return []
    first = points[0].cost
    text = [
        "",
        f"one forward over so many rows; the ridge is at {chip.ridge_rows:.0f}",
        f"  {'rows':>6}{'ideal ms':>11}{'roofline':>11}{'cycles':>11}{'× first, by cycles':>22}",
    ]
    for point in points:
        cost, rise = point.cost, point.cost.cycles_ms / first.cycles_ms
        note = "flat" if rise <= _FLAT else "not flat"
        text.append(
            f"  {point.rows:>6}{cost.ideal_ms:>11.3f}{cost.roofline_ms:>11.3f}"
            f"{cost.cycles_ms:>11.3f}{rise:>22.2f}  {note}"
        )
    return text


def to_json(points: Sequence[CurvePoint]) -> list[dict[str, Any]]:
    """The curve as plain numbers."""
    return [{"rows": point.rows, **dataclasses.asdict(point.cost)} for point in points]
