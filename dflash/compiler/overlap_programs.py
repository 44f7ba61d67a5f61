"""Programs of one overlapped cycle, compiled for the target's and the drafter's chips."""

import time
from collections.abc import Iterator

import jax
from flax import nnx

from dflash.compiler import programs
from dflash.compiler.programs import CompiledProgram, OnStart
from dflash.config.tpu_schema import CompileDecode
from dflash.inference.engine import NUM_STOP_IDS
from dflash.inference.overlap.engine import OverlappedEngine
from dflash.loading import decode_plan, engines, models, weights
from dflash.parallel.sharding import Sharding

VERIFY, ADVANCE, DRAFT, SPECULATE = "verify", "advance", "draft", "speculate"
_TITLES = {
    ADVANCE: "advance: observe the committed rows, look up the outcome, draft anew",
    DRAFT: "draft: one block of every sequence",
    SPECULATE: "speculate: a block for each foreseen outcome",
}


def compile_overlapped(
    config: CompileDecode, target_place: Sharding, drafter_place: Sharding, on_start: OnStart
) -> Iterator[CompiledProgram]:
    """Yields the programs of a cycle: the target's, then the drafter's, each compiled on demand.

    Args:
      config: Config of the run, with `drafter.overlap`.
      target_place: Sharding over the target's chips.
      drafter_place: Sharding over the drafter's chips.
      on_start: Called with the title of each program.
    """
    engine = _engine(config, target_place, drafter_place)
    decode, groups = config.decode, engine.overlap.groups
    rows, capacity = engine.drafter.block_size, engine.layout.capacity
    context = min(config.tpu.context or capacity, capacity - rows)
    batch, cache = decode.batch_size // groups, engine.abstract_state().cache
    arguments = {
        "target weights": _bytes(nnx.state(engine.target, nnx.Param)),
        "target KV": _bytes((cache.pools, cache.page_table)),
    }
    title = f"verify: batch {batch}, {rows} rows per sequence, context {context}"
    on_start(title)
    begin = time.perf_counter()
    compiled = engine.program("generate")
    ideals = programs.target_ideals(engine.target, rows, context, cache)
    yield _program(VERIFY, title, compiled, begin, context, ideals, arguments)
    drafter, held = engine.drafting_shapes.drafter, engine.abstract_drafting()
    size = _bytes((nnx.state(drafter, nnx.Param), held)) / 1e9
    for kind in (ADVANCE, DRAFT, *([SPECULATE] if engine.overlap.fan_out else [])):
        title = f"{_TITLES[kind]}; batch {batch}, on the drafter's chips, which hold {size:.2f} GB"
        on_start(title)
        begin = time.perf_counter()
        compiled = engine.drafting_program(kind)
        yield _program(kind, title, compiled, begin, context, {}, {})


def _engine(
    config: CompileDecode, target_place: Sharding, drafter_place: Sharding
) -> OverlappedEngine:
    source = models.find_target(config.target, download=False)
    target = models.build_target(config.target, source, dtype=config.dtype, sharding=target_place)
    source = models.find_drafter(config.drafter, download=False)
    drafter = models.build_drafter(
        config.drafter, source, target.arch, dtype=config.dtype, sharding=drafter_place
    )
    engines.check_drafter(config, target, drafter)
    for model, place in ((target, target_place), (drafter, drafter_place)):
        weights.arrange(model, place)
    decode = config.decode
    return engines.make_engine(
        config,
        target,
        drafter,
        max_length=decode.max_length or decode.prefill_chunk + decode.max_new_tokens,
        num_stop_ids=NUM_STOP_IDS,
        there=drafter_place,
    )


def _program(name, title, compiled: jax.stages.Compiled, begin, context, ideals, arguments):
    seconds = time.perf_counter() - begin
    return CompiledProgram(name, title, compiled, seconds, context, ideals, arguments)


def _bytes(tree) -> int:
    return decode_plan.measure(tree).device_bytes
