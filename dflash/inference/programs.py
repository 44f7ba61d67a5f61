"""The engine's programs: plain functions, and one table of how each is compiled.

Every program is compiled ahead of time for shapes that are known beforehand, so that nothing
compiles inside a measured call. A program is named by its entry in `TABLE`, followed by its sizes,
such as ("prefill", 64).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter
from dflash.inference import (
    adaptive,
    batch_buckets,
    controls,
    dispatch,
    first_token,
    nonfinite,
    timing,
)
from dflash.inference.controls import Controls
from dflash.inference.prefill import ChunkInputs, prefill_chunk, replay_chunk
from dflash.inference.request import Sampling
from dflash.inference.sampling import SamplingParams
from dflash.inference.shapes import Shapes, places
from dflash.inference.state import DecodeState
from dflash.layers.linear import matmul_precision
from dflash.models.decoder import Decoder
from dflash.parallel.sharding import zeros

Name = tuple  # an entry of the table and its sizes


@dataclasses.dataclass(frozen=True)
class Program:
    """How a function is compiled. All fields but the last two are called with shapes and sizes.

    Attributes:
      function: Returns the pure function, bound to what is static.
      arguments: Returns its abstract arguments.
      results: Returns the shardings of its results, or a pytree prefix of them.
      donated: Indices of the arguments whose buffers the results take over.
      loops: The function loops over cycles and needs the compiler options for loops.
    """

    function: Callable[..., Callable]
    arguments: Callable[..., tuple]
    results: Callable[..., Any]
    donated: tuple[int, ...] = ()
    loops: bool = False

    def compile(self, shapes: Shapes, *sizes: int) -> jax.stages.Compiled:
        """Compiles the function for the shapes of an engine."""
        jitted = jax.jit(
            self.function(shapes, *sizes),
            donate_argnums=self.donated,
            out_shardings=self.results(shapes, *sizes),
        )
        options = shapes.loop_options if self.loops else None
        with jax.default_matmul_precision(matmul_precision(shapes.target.dtype)):
            lowered = jitted.lower(*self.arguments(shapes, *sizes))
            return lowered.compile(compiler_options=options or None)


class Programs:
    """The programs of one engine, compiled when they are first asked for."""

    def __init__(self, shapes: Shapes):
        """Starts with the programs of `TABLE`."""
        self._shapes = shapes
        self._table = dict(TABLE)
        self._compiled: dict[Name, jax.stages.Compiled] = {}

    def add(self, name: str, function: Callable) -> None:
        """Adds a program over the models and the state; see `Engine.add_program`."""
        self._table[name] = over_state(self._shapes, function)

    def get(self, kind: str, *sizes: int) -> jax.stages.Compiled:
        """Returns the compiled program of this name."""
        name = (kind, *sizes)
        if name not in self._compiled:
            self._compiled[name] = self._table[kind].compile(self._shapes, *sizes)
        return self._compiled[name]

    def missing(self, prompt_lengths: Iterable[int], *, grammars: bool = False) -> list[Name]:
        """Returns the `names` that are not compiled yet."""
        needed = names(self._shapes, prompt_lengths, grammars=grammars)
        return [name for name in needed if name not in self._compiled]


def names(shapes: Shapes, prompt_lengths: Iterable[int], *, grammars: bool = False) -> list[Name]:
    """Returns the names of the programs that prompts of some lengths need.

    Args:
      shapes: Shapes of the engine.
      prompt_lengths: Lengths of the prompts, in tokens.
      grammars: Include the programs of sequences with grammars.
    """
    layout = shapes.layout
    chunks = layout.chunks(prompt_lengths)
    needed: list[Name] = [("new_state",), ("new_lanes",), *(("prefill", rows) for rows in chunks)]
    needed += [("plain", lanes) for lanes in sorted({1, shapes.num_lanes})]
    needed += [("insert",), ("generate",), ("release",)]
    needed += [("generate", width) for width in layout.widths[:-1]]
    if grammars:
        needed += [("draft",), ("conclude",)]
    if layout.overcommits:
        needed.append(("set_pages",))
    if keeps_rows(shapes):
        needed += [("new_context",), ("store",), ("restore",)]
    if replays(shapes):
        needed += [("replay", rows) for rows in chunks]
    if len(shapes.block_sizes) > 1:
        needed.append(("occupied",))
    return needed


def keeps_rows(shapes: Shapes) -> bool:
    """Returns whether rows of the drafter are kept beside cached pages of the target."""
    return shapes.layout.prefix_cache and bool(jax.tree.leaves(shapes.context()))


def replays(shapes: Shapes) -> bool:
    """Returns whether the drafter observes cached tokens again."""
    return shapes.layout.prefix_cache and shapes.drafter.prefix_cache_mode == "tokens"


# --- the state ----------------------------------------------------------------------------------


def new_state(shapes: Shapes, seconds: jax.Array) -> DecodeState:
    """Creates a batch of empty slots."""
    state = zeros(shapes.state())
    plain = controls.plain(shapes.layout.batch_size, shapes.layout.max_length)
    return dataclasses.replace(
        state,
        # An empty slot has a length of 1: its rows go to the start of the scratch page.
        length=jnp.ones_like(state.length),
        controls=jax.tree.map(jnp.asarray, plain),
        adaptive=adaptive.with_seconds(state.adaptive, seconds),
    )


def insert(
    drafter: Drafter,
    state: DecodeState,
    lanes: Any,
    anchors: jax.Array,
    lane: jax.Array,
    slot: jax.Array,
    table: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    stop_ids: jax.Array,
    asked: Controls,
    sampling: SamplingParams,
) -> DecodeState:
    """Puts a prefilled sequence into a slot, and decides whether it has ended already.

    Args:
      drafter: The drafter; it copies its state from the lane.
      state: The batch.
      lanes: The drafter's state of the prompts in prefill.
      anchors: The last token of each of them, int32 [n].
      lane: Lane of the sequence.
      slot: Slot to fill.
      table: Pages of the sequence, int32 [M].
      length: Committed tokens, the anchor included.
      limit: Length at which the sequence ends.
      stop_ids: Tokens that end it, int32 [E].
      asked: Its controls, with a batch dimension of 1.
      sampling: Its sampling parameters, without a batch dimension.
    """
    anchor = anchors[lane]
    # The anchor of a new sequence may be on the device alone.
    asked = asked.with_tokens(
        jnp.reshape(length - 1, 1), anchor[None, None], jnp.ones(1, jnp.int32)
    )
    ended = (length >= limit) | jnp.any(anchor == stop_ids) | (anchor == nonfinite.NO_TOKEN)
    params = jax.tree.map(lambda x: x[None], sampling).with_keys()
    page_table = state.cache.page_table.at[slot].set(table)

    def put(batch, one):
        return batch.at[slot].set(one[0])

    return DecodeState(
        length=state.length.at[slot].set(length),
        limit=state.limit.at[slot].set(limit),
        anchor=state.anchor.at[slot].set(anchor),
        active=state.active.at[slot].set(~ended),
        stop_ids=state.stop_ids.at[slot].set(stop_ids),
        sampling=jax.tree.map(put, state.sampling, params),
        controls=jax.tree.map(put, state.controls, asked),
        cache=dataclasses.replace(state.cache, page_table=page_table),
        drafter=drafter.insert(state.drafter, lanes, lane, slot),
        adaptive=state.adaptive and state.adaptive.insert(slot),
        nonfinite_at=state.nonfinite_at.at[slot].set(0),
        concluded=state.concluded,
    )


def release(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Empties a slot, so that its pages may be handed out again."""
    table = state.cache.page_table.at[slot].set(0)
    # An empty slot is greedy, so that a batch of greedy sequences skips all noise.
    temperature = state.sampling.temperature.at[slot].set(0)
    return dataclasses.replace(
        state,
        length=state.length.at[slot].set(1),
        active=state.active.at[slot].set(False),
        sampling=dataclasses.replace(state.sampling, temperature=temperature),
        cache=dataclasses.replace(state.cache, page_table=table),
    )


def set_pages(state: DecodeState, table: jax.Array) -> DecodeState:
    """Replaces the page table, int32 [B, M]."""
    cache = dataclasses.replace(state.cache, page_table=table)
    return dataclasses.replace(state, cache=cache)


def generate(shapes: Shapes, width: int | None = None) -> Callable:
    """Returns a dispatch over the first `width` slots of each replica; None for all slots."""
    entry = shapes.layout.widths.index(width or shapes.layout.slots_per_replica)

    def run(target: Decoder, drafter: Drafter, state: DecodeState):
        if state.adaptive is not None:
            state = dataclasses.replace(state, adaptive=state.adaptive.at_width(entry))
        return dispatch.run_cycles(
            target, drafter, state, max_cycles=shapes.config.sync_every, rules=shapes.rules
        )

    if width is None:
        return run
    return batch_buckets.over_first_slots(run, shapes.state(width), shapes.layout.num_replicas)


def occupied(shapes: Shapes) -> Callable:
    """Returns `timing.occupy` for the engine's layout and default sampling."""
    return functools.partial(
        timing.occupy,
        layout=shapes.layout,
        sampling=Sampling.from_config(shapes.config),
        vocab_size=shapes.vocab_size,
    )


# --- prompts ------------------------------------------------------------------------------------


def prefill(
    target: Decoder, drafter: Drafter, cache, lanes, chunk: ChunkInputs, asked, sampling
) -> tuple:
    """Runs one chunk of each prompt; see `prefill_chunk`."""
    return prefill_chunk(target, drafter, cache, lanes, chunk, sampling.with_keys(), asked)


def plain(shapes: Shapes, lanes: int) -> first_token.FirstTokenConstraints:
    """Creates the constraints of unconstrained sequences on the device.

    They stay there, so that they are not transferred on every call.
    """
    asked = first_token.plain(lanes, shapes.layout.max_length, shapes.vocab_size)
    return jax.tree.map(jnp.asarray, asked)


# --- the prefix cache ---------------------------------------------------------------------------


def store(shapes: Shapes, context: Any, state: Any, slot, pages, end) -> Any:
    """Copies a slot's rows of the drafter's state to pages.

    Args:
      shapes: Shapes of the engine.
      context: Pages of the drafter's rows.
      state: The drafter's state.
      slot: Slot to copy from.
      pages: Pages to copy to, int32 [M]; 0 for rows that are not wanted.
      end: Number of pages.
    """
    size, slots = shapes.layout.page_size, shapes.layout.slots_per_replica
    replica, mine = slot // slots, slot % slots

    def put(i, context):
        rows = shapes.drafter.read_rows(state, mine, i * size, size)
        return jax.tree.map(lambda pool, new: pool.at[pages[i]].set(new), context, rows)

    is_mine = replica == shapes.sharding.index("pages")
    return jax.lax.fori_loop(0, jnp.where(is_mine, end, 0), put, context)


def restore(shapes: Shapes, lanes: Any, context: Any, lane, pages, end) -> Any:
    """Copies pages to the first rows of a lane; the arguments are those of `store`."""
    size = shapes.layout.page_size
    is_mine = lane == shapes.sharding.index("pages")

    def put(i, lanes):
        rows = jax.tree.map(lambda pool: pool[pages[i]], context)
        return shapes.drafter.write_rows(lanes, jnp.int32(0), i * size, rows)

    lanes = shapes.drafter.clear(lanes, jnp.reshape(is_mine, (1,)))
    return jax.lax.fori_loop(0, jnp.where(is_mine, end, 0), put, lanes)


def replay(target: Decoder, drafter: Drafter, lanes: Any, chunk: ChunkInputs) -> Any:
    """Lets the drafter observe cached tokens again; see `replay_chunk`."""
    return replay_chunk(drafter, lanes, chunk, target)


def _per_device(shapes: Shapes, function: Callable, arguments: tuple, results: Any) -> Callable:
    """Returns a function that each device runs on its own shards."""
    if shapes.sharding.mesh.size == 1:
        return function
    in_specs, out_specs = jax.tree.map(lambda sharding: sharding.spec, (places(arguments), results))
    return jax.shard_map(
        function,
        mesh=shapes.sharding.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


# --- non-finite logits --------------------------------------------------------------------------


def new_examined(shapes: Shapes) -> Any:
    """Creates the cache of one sequence that is examined alone; it owns all pages but scratch."""
    cache = zeros(shapes.examined())
    table = jnp.arange(1, cache.page_table.shape[1] + 1, dtype=jnp.int32)[None]
    return dataclasses.replace(cache, page_table=table)


# --- the table ----------------------------------------------------------------------------------


def over_state(shapes: Shapes, function: Callable) -> Program:
    """Returns the program of a function of (target, drafter, state); see `Engine.add_program`."""
    arguments = *shapes.weights, shapes.state()
    program = shapes.over_models(function)

    def place(result):
        return places(shapes.state()) if _is_state(result) else shapes.replicated

    results = jax.eval_shape(program, *arguments)
    consumes = any(map(_is_state, jax.tree.leaves(results, is_leaf=_is_state)))
    return Program(
        lambda _: program,
        lambda _: arguments,
        lambda _: jax.tree.map(place, results, is_leaf=_is_state),
        donated=(2,) if consumes else (),
        loops=True,
    )


def _is_state(x: Any) -> bool:
    return isinstance(x, DecodeState)


def _state_and_report(shapes: Shapes, *_: int) -> tuple:
    return places(shapes.state()), shapes.replicated


def _conclude(shapes: Shapes) -> Callable:
    return shapes.over_models(functools.partial(dispatch.conclude, rules=shapes.rules))


def _conclude_arguments(shapes: Shapes) -> tuple:
    layout, words = shapes.layout, first_token.num_words(shapes.vocab_size)
    allowed = shapes.whole((layout.batch_size, layout.block_size, words))
    ready = shapes.whole((layout.batch_size,), jnp.bool_)
    return *shapes.weights, shapes.state(), shapes.proposal(shapes.propose()), allowed, ready


def _insert_arguments(shapes: Shapes) -> tuple:
    number, anchors = shapes.scalar(), shapes.whole((shapes.num_lanes,))
    stop_ids = shapes.whole((shapes.num_stop_ids,))
    where = number, number, shapes.table_row(), number, number, stop_ids
    asked = shapes.constraints(1).controls
    return shapes.state(), shapes.lanes(), anchors, *where, asked, shapes.one_sampling()


def _prefill_arguments(shapes: Shapes, rows: int) -> tuple:
    lanes = shapes.num_lanes
    prompts = shapes.chunk(rows), shapes.constraints(lanes), shapes.sampling(lanes)
    return *shapes.weights, shapes.state().cache, shapes.lanes(), *prompts


def _prefill_results(shapes: Shapes, rows: int) -> tuple:
    replicated = shapes.replicated
    return places(shapes.state().cache), places(shapes.lanes()), replicated, replicated


def _store_arguments(shapes: Shapes) -> tuple:
    state = shapes.state().drafter
    return shapes.context(), state, shapes.scalar(), shapes.table_row(), shapes.scalar()


def _restore_arguments(shapes: Shapes) -> tuple:
    lanes, context = shapes.lanes(), shapes.context()
    return lanes, context, shapes.scalar(), shapes.table_row(), shapes.scalar()


def _store(shapes: Shapes) -> Callable:
    function = functools.partial(store, shapes)
    return _per_device(shapes, function, _store_arguments(shapes), places(shapes.context()))


def _restore(shapes: Shapes) -> Callable:
    function = functools.partial(restore, shapes)
    return _per_device(shapes, function, _restore_arguments(shapes), places(shapes.lanes()))


def _examine_arguments(shapes: Shapes, rows: int) -> tuple:
    number = shapes.scalar()
    return shapes.weights[0], shapes.examined(), shapes.whole((1, rows)), number, number


TABLE: dict[str, Program] = {
    "new_state": Program(
        lambda shapes: functools.partial(new_state, shapes),
        lambda shapes: (shapes.seconds(),),
        lambda shapes: places(shapes.state()),
    ),
    "insert": Program(
        lambda shapes: functools.partial(insert, shapes.drafter),
        _insert_arguments,
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    "generate": Program(
        lambda shapes, *width: shapes.over_models(generate(shapes, *width)),
        lambda shapes, *_: (*shapes.weights, shapes.state()),
        _state_and_report,
        donated=(2,),
        loops=True,
    ),
    "release": Program(
        lambda shapes: release,
        lambda shapes: (shapes.state(), shapes.scalar()),
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    "set_pages": Program(
        lambda shapes: set_pages,
        lambda shapes: (
            shapes.state(),
            shapes.whole((shapes.layout.batch_size, shapes.layout.pages_per_sequence)),
        ),
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    "occupied": Program(
        occupied,
        lambda shapes: (shapes.state(), shapes.seconds()),
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    # Grammars: the host reads the proposal and answers with masks.
    "draft": Program(
        Shapes.propose,
        lambda shapes: (*shapes.weights, shapes.state()),
        lambda shapes: places((shapes.state(), shapes.proposal(shapes.propose()))),
        donated=(2,),
    ),
    "conclude": Program(
        _conclude, _conclude_arguments, _state_and_report, donated=(2,), loops=True
    ),
    # Prompts.
    "new_lanes": Program(
        lambda shapes: lambda: zeros(shapes.lanes()),
        lambda shapes: (),
        lambda shapes: places(shapes.lanes()),
    ),
    "plain": Program(
        lambda shapes, lanes: functools.partial(plain, shapes, lanes),
        lambda shapes, lanes: (),
        lambda shapes, lanes: shapes.replicated,
    ),
    "prefill": Program(
        lambda shapes, rows: shapes.over_models(prefill),
        _prefill_arguments,
        _prefill_results,
        donated=(2, 3),
    ),
    # The prefix cache.
    "new_context": Program(
        lambda shapes: lambda: zeros(shapes.context()),
        lambda shapes: (),
        lambda shapes: places(shapes.context()),
    ),
    "store": Program(
        _store, _store_arguments, lambda shapes: places(shapes.context()), donated=(0,)
    ),
    "restore": Program(
        _restore, _restore_arguments, lambda shapes: places(shapes.lanes()), donated=(0,)
    ),
    "replay": Program(
        lambda shapes, rows: shapes.over_models(replay),
        lambda shapes, rows: (*shapes.weights, shapes.lanes(), shapes.chunk(rows)),
        lambda shapes, rows: places(shapes.lanes()),
        donated=(2,),
    ),
    # Non-finite logits: one sequence runs again, alone.
    "new_examined": Program(
        lambda shapes: functools.partial(new_examined, shapes),
        lambda shapes: (),
        lambda shapes: places(shapes.examined()),
    ),
    "examine": Program(
        lambda shapes, rows: shapes.over_target(nonfinite.examine_chunk),
        _examine_arguments,
        lambda shapes, rows: (places(shapes.examined()), shapes.replicated),
        donated=(1,),
    ),
}
