"""Cost of a target forward by number of rows: flat while memory-bound, rising past the ridge.

Only two layers and the output head are compiled; the layers' cost is scaled to the target's depth.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.compiler import components, costs, hlo, programs
from dflash.compiler.components import ATTENTION, MLP, Component
from dflash.compiler.report import RunAssumptions
from dflash.compiler.topology import TpuMachine
from dflash.config.schema import DecodeConfig
from dflash.layers.products import matmul_precision
from dflash.loading import models
from dflash.models.decoder import Decoder
from dflash.parallel.chips import Chip

_LAYERS = 2
# The curve counts as flat up to this multiple of the cost of the first point.
_FLAT = 1.1


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Cost of one target forward over `rows` rows of a sequence, per device."""

    rows: int
    cost: Component


def compile_curve(
    config: Any,
    rows: Sequence[int],
    machine: TpuMachine,
    progress: Callable[[str, float], None] = lambda title, fraction: None,
    keep: Callable[[Sequence[CurvePoint]], None] = lambda points: None,
) -> list[CurvePoint]:
    """Compiles a target forward for each number of rows.

    Args:
      config: Config of the run.
      rows: Numbers of rows, each for a batch of one sequence.
      machine: Topology to compile for.
      progress: Called before each compilation with its title and the fraction that is done.
      keep: Called after each compilation with the points so far.
    Raises:
      ConfigError: The config does not contain the target's architecture.
    """
    if not rows:
        return []
    shape = config.target.architecture
    if shape is None:
        raise errors.ConfigError("--rows: requires target.architecture in the config")
    shallow = dataclasses.replace(shape, num_hidden_layers=_LAYERS)
    group = dataclasses.replace(config.target, checkpoint=models.RANDOM, architecture=shallow)
    source = models.find_target(group)
    dtype = getattr(config, "dtype", "bfloat16")
    target = models.build_target(group, source, dtype=dtype, sharding=machine.sharding)
    models.arrange(target, machine.sharding)
    points = []
    for count in rows:
        progress(f"{count} rows", len(points) / len(rows))
        cost = _cost(target, count, config, machine, shape.num_hidden_layers)
        points.append(CurvePoint(count, cost))
        keep(points)
    return points


def _cost(target: Decoder, rows: int, config: Any, machine: TpuMachine, depth: int) -> Component:
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
    operations = costs.operations(module, trips=assumptions.trips, branch=assumptions.branch)
    ideals = programs.target_ideals(target, rows, context, cache)
    chip = machine.topology.chip
    return at_depth(components.summarize(operations, ideals, chip, machine.rates), depth)


def at_depth(parts: Mapping[str, Component], depth: int) -> Component:
    """Scales the components of a target with `_LAYERS` layers to `depth` layers and sums them."""
    repeats = {ATTENTION: depth / _LAYERS, MLP: depth / _LAYERS}
    return components.total(
        components.scaled(part, repeats.get(name, 1)) for name, part in parts.items()
    )


def lines(points: Sequence[CurvePoint], chip: Chip) -> list[str]:
    """Formats the curve as lines of text; empty without points."""
    if not points:
        return []
    first = points[0].cost
    text = [
        "",
        f"one target forward by number of rows; the ridge is at {chip.ridge_rows:.0f}",
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
    """Returns the curve as JSON values."""
    return [{"rows": point.rows, **dataclasses.asdict(point.cost)} for point in points]
