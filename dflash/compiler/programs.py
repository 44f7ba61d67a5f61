"""Programs of a run, compiled for a topology, and lower bounds on the bytes that each reads."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.compiler.components import ATTENTION, DRAFTER, MLP, REST, UNEMBED
from dflash.config.schema import DecodeConfig, DecodeRun, DrafterConfig, TargetConfig
from dflash.config.tpu_schema import CompileTrain, TpuConfig
from dflash.drafters.base import Drafter
from dflash.inference.engine import Engine
from dflash.layers import moe
from dflash.layers.cache import PagedCache
from dflash.loading import models
from dflash.loading.decode_plan import device_bytes
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding
from dflash.training import state as states
from dflash.training import tasks
from dflash.training.optimizer import make_optimizer, make_schedule
from dflash.training.step import make_train_step

CYCLE, PREFILL, TRAIN = "cycle", "prefill", "train step"


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Program of a run, compiled for a topology.

    Attributes:
      name: `CYCLE`, `PREFILL` or `TRAIN`.
      title: Description of what one execution does.
      seconds: Compile time in seconds.
      context: Tokens per sequence that attention reads.
      ideals: Lower bounds on the bytes read per device, by component. The head counts once.
      arguments: Bytes of the arguments on each device, by kind.
      turns: Maximum iterations of the outermost loop per dispatch; 1 for a program without a loop.
    """

    name: str
    title: str
    compiled: jax.stages.Compiled
    seconds: float
    context: int
    ideals: Mapping[str, float]
    arguments: Mapping[str, int]
    turns: int = 1

    @property
    def is_loop(self) -> bool:
        """Returns whether the program is a loop, whose figures are reported per iteration."""
        return self.name == CYCLE


# Called with the title of a program before it is compiled.
OnStart = Callable[[str], None]


def count(config: DecodeRun | CompileTrain, tpu: TpuConfig) -> int:
    """Returns the number of programs that a run compiles."""
    names = [CYCLE, PREFILL]
    if isinstance(config, CompileTrain):
        names = [TRAIN, *(names if config.evaluation.prompts else ())]
    return sum(_is_selected(name, tpu) for name in names)


def decoding_models(
    verifying: TargetConfig, drafting: DrafterConfig, dtype: str, sharding: Sharding
) -> tuple[Decoder, Drafter]:
    """Builds a target and a drafter without weights, arranged as for decoding."""
    build = {"dtype": dtype, "sharding": sharding}
    source = models.find_target(verifying, download=False)
    target = models.build_target(verifying, source, **build)
    source = models.find_drafter(drafting, download=False)
    drafter = models.build_drafter(drafting, source, target.arch, **build)
    drafter.tabulate(target)
    for model in (target, drafter):
        models.arrange(model, sharding)
    return target, drafter


def compile_training(
    config: CompileTrain, sharding: Sharding, on_start: OnStart
) -> Iterator[CompiledProgram]:
    """Yields the train step, and for a drafter also the cycle and prefill of its evaluation."""
    task = tasks.make_task(config, sharding, download=False)
    if _is_selected(TRAIN, config.tpu):
        yield _train_step(task, sharding, on_start)
    if task.drafts and config.evaluation.prompts:
        decode = config.evaluation_decode
        task.working.tabulate(task.target)
        yield from compile_decoding(task.target, task.working, decode, config.tpu, on_start)


def _is_selected(name: str, tpu: TpuConfig) -> bool:
    return tpu.only in ("all", name)


def compile_decoding(
    target, drafter, config: DecodeConfig, tpu: TpuConfig, on_start: OnStart
) -> Iterator[CompiledProgram]:
    """Yields the cycle and the largest prefill of two models, each compiled on demand."""
    max_length = config.max_length or config.prefill_chunk + config.max_new_tokens
    engine = Engine(target, drafter, config, max_length=max_length)
    max_context = max_length - drafter.block_size
    context = min(tpu.context or max_context, max_context)
    state = engine.abstract_state()
    cache, capacity = state.cache, engine.layout.capacity
    arguments = {
        "target weights": device_bytes(nnx.state(target, nnx.Param)),
        "drafter weights": device_bytes(nnx.state(drafter, nnx.Param)),
        "target KV": device_bytes((cache.pools, cache.page_table)),
        "draft KV": device_bytes(state.drafter),
    }
    if cache.states:
        arguments["recurrent state"] = device_bytes(cache.states)
    if _is_selected(CYCLE, tpu):
        title = (
            f"cycle: batch {config.batch_size}, {drafter.block_size} rows per sequence, "
            f"context {context}"
        )
        on_start(title)
        compiled, seconds = _compile_timed(engine, "generate")
        ideals = cycle_ideals(target, arguments, drafter.block_size, context, cache, capacity)
        turns = config.sync_every
        yield CompiledProgram(CYCLE, title, compiled, seconds, context, ideals, arguments, turns)
    if _is_selected(PREFILL, tpu):
        chunk = engine.layout.chunk(context)
        before = max(context - chunk, 0)
        title = f"prefill: {chunk} tokens, context {before}"
        on_start(title)
        compiled, seconds = _compile_timed(engine, "prefill", chunk)
        ideals = cycle_ideals(target, arguments, chunk, 0, cache, capacity)
        yield CompiledProgram(PREFILL, title, compiled, seconds, before, ideals, arguments)


def _compile_timed(engine: Engine, *name) -> tuple[jax.stages.Compiled, float]:
    begin = time.perf_counter()
    return engine.program(*name), time.perf_counter() - begin


def cycle_ideals(
    target: Decoder,
    arguments: Mapping[str, int],
    rows: int,
    context: int,
    cache: PagedCache,
    capacity: int,
) -> dict[str, float]:
    """Returns `target_ideals` and those of a drafter, which reads the used part of its caches."""
    drafter = arguments["drafter weights"] + context / capacity * arguments["draft KV"]
    return {**target_ideals(target, rows, context, cache), DRAFTER: drafter}


def target_ideals(target: Decoder, rows: int, context: int, cache: PagedCache) -> dict[str, float]:
    """Returns lower bounds on the bytes that a target forward reads per device, by component.

    Every weight and every row of the context counts once.
    Only the experts that a device's rows are expected to activate count; see `moe.shares`.

    Args:
      target: Target, which may be abstract.
      rows: New rows per sequence.
      context: Tokens per sequence that attention reads.
      cache: Cache of the sequences, with their number and their sharding.
    """
    sizes = dict.fromkeys((ATTENTION, MLP, UNEMBED, REST), 0.0)
    sequences = -(-cache.page_table.shape[0] // target.sharding.size("batch"))
    share_of = moe.shares(target, rows * sequences)
    for path, param in parameters.named_parameters(target):
        if name := _component_of_weight(path, target):
            size = device_bytes(param.get_value())
            sizes[name] += size * share_of(path).read
    in_use = context * cache.page_table.shape[0]
    for pool in cache.pools:
        # The pool of a layer with a window may hold less than the context.
        share = min(1.0, in_use / (pool.shape[1] * cache.page_size))
        sizes[ATTENTION] += share * device_bytes(pool)
    # Recurrent state is read, and written back.
    sizes[ATTENTION] += 2 * device_bytes(cache.states)
    return sizes


def _component_of_weight(path: str, target: Decoder) -> str | None:
    """Returns the component of a weight; None for an embedding table that is only looked up."""
    if ".self_attn." in path or path.endswith("input_layernorm.scale"):
        return ATTENTION
    if ".mlp." in path or path.endswith("post_attention_layernorm.scale"):
        return MLP
    head = "embed_tokens" if target.lm_head is None else "lm_head"
    if path.startswith(head):
        return UNEMBED
    return None if path.startswith("embed_tokens") else REST


def _train_step(task: tasks.Task, sharding: Sharding, on_start: OnStart) -> CompiledProgram:
    config = task.config
    steps = config.train.steps or 1
    optimizer = make_optimizer(config.optimizer, steps)
    schedule = make_schedule(config.optimizer, steps)
    _, params = states.split(task.learner)
    state = states.abstract(params, optimizer, sharding)
    frozen = task.abstract_frozen()
    batch = _abstract_batch(task, sharding)
    step = make_train_step(
        task.loss,
        optimizer,
        schedule,
        dtype=task.dtype,
        accumulate_steps=config.optimizer.accumulate_steps,
        sharding=sharding,
        state=state,
    )
    title = f"train step: {config.train.batch_size} rows of {config.data.length} tokens"
    on_start(title)
    begin = time.perf_counter()
    compiled = step.lower(state, frozen, batch).compile()
    seconds = time.perf_counter() - begin
    arguments = {
        "learning weights": device_bytes(state.params),
        "optimizer": device_bytes(state.optimizer),
        "frozen weights": device_bytes(frozen),
        "batch": device_bytes(batch),
    }
    learner = DRAFTER if task.drafts else MLP
    tokens = config.train.batch_size * config.data.length
    ideals = _frozen_ideals(task, tokens)
    # The optimizer reads and writes the weights and the moments.
    updated = arguments["learning weights"] + arguments["optimizer"]
    ideals[learner] = ideals.get(learner, 0) + 2 * updated
    return CompiledProgram(TRAIN, title, compiled, seconds, config.data.length, ideals, arguments)


def _frozen_ideals(task: tasks.Task, tokens: int) -> dict[str, float]:
    if not task.drafts:
        return {}
    cache = task.target.new_cache(batch=1, pages_per_sequence=1, num_pages=1, page_size=8)
    return target_ideals(task.target, tokens, 0, cache)


def _abstract_batch(task: tasks.Task, sharding: Sharding) -> dict[str, Any]:
    rows, length = task.config.train.batch_size, task.config.data.length

    def array(dtype=jnp.int32):
        return sharding.abstract((rows, length), ("batch", None), dtype)

    batch = {name: array() for name in ("tokens", "positions", "segment_ids")}
    return batch | {"loss_mask": array(jnp.float32)}
