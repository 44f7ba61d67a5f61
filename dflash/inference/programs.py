"""Functions of the engine's programs; `program_table` defines how each is compiled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter
from dflash.inference import batch_buckets, first_token, timing
from dflash.inference.cycle import dispatch
from dflash.inference.cycle.state import DecodeState, Occupancy
from dflash.inference.logits import controls, nonfinite
from dflash.inference.logits.controls import Controls
from dflash.inference.logits.sampling import SamplingParams
from dflash.inference.prefill import ChunkInputs, prefill_chunk, replay_chunk
from dflash.inference.request import RequestSampling
from dflash.inference.shapes import Shapes
from dflash.models.decoder import Decoder
from dflash.parallel.sharding import zeros

# --- the state ----------------------------------------------------------------------------------


def new_state(shapes: Shapes, seconds: jax.Array) -> DecodeState:
    """Creates a batch of empty slots."""
    state = zeros(shapes.state())
    default = controls.default(shapes.layout.batch_size, shapes.layout.max_length)
    cache = state.cache
    if cache.slots is not None:
        slots = jnp.arange(shapes.layout.batch_size, dtype=jnp.int32)
        cache = dataclasses.replace(cache, slots=slots % shapes.layout.slots_per_replica)
    return dataclasses.replace(
        state,
        cache=cache,
        # An empty slot has a length of 1: its rows go to the start of the scratch page.
        length=jnp.ones_like(state.length),
        controls=jax.tree.map(jnp.asarray, default),
        choice=state.choice.starting(seconds),
    )


def insert(
    drafter: Drafter,
    state: DecodeState,
    prefill_state: Any,
    anchors: jax.Array,
    prefill_slot: jax.Array,
    slot: jax.Array,
    table: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    stop_ids: jax.Array,
    request_controls: Controls,
    sampling: SamplingParams,
    adapter: jax.Array | None,
) -> DecodeState:
    """Puts a prefilled sequence into a slot, and decides whether it has ended already.

    Args:
      drafter: The drafter, whose state is copied from the prefill slot.
      prefill_state: The drafter's state of the prompts in prefill.
      anchors: Token after the last chunk of each prompt, int32 [n].
      table: Pages of the sequence, int32 [M].
      length: Committed tokens, the anchor included.
      limit: Length at which the sequence ends.
      stop_ids: Tokens that end it, int32 [E].
      request_controls: Its logit controls, with a batch axis of size 1.
      sampling: Its sampling parameters, without a batch axis.
      adapter: Number of its adapter; None if the target has none.
    """
    anchor = anchors[prefill_slot]
    # The host does not know the anchor of a new sequence yet.
    request_controls = request_controls.with_tokens(
        jnp.reshape(length - 1, 1), anchor[None, None], jnp.ones(1, jnp.int32)
    )
    ended = (length >= limit) | jnp.any(anchor == stop_ids) | (anchor == nonfinite.NO_TOKEN)
    params = jax.tree.map(lambda x: x[None], sampling).with_keys()
    state = set_pages(state, state.cache.page_table.at[slot].set(table))

    def put(batch, row):
        return batch.at[slot].set(row[0])

    return dataclasses.replace(
        state,
        length=state.length.at[slot].set(length),
        limit=state.limit.at[slot].set(limit),
        anchor=state.anchor.at[slot].set(anchor),
        active=state.active.at[slot].set(~ended),
        stop_ids=state.stop_ids.at[slot].set(stop_ids),
        sampling=jax.tree.map(put, state.sampling, params),
        controls=jax.tree.map(put, state.controls, request_controls),
        drafter=drafter.insert(state.drafter, prefill_state, prefill_slot, slot),
        choice=state.choice.insert(slot),
        nonfinite_at=state.nonfinite_at.at[slot].set(0),
        adapter=None if adapter is None else state.adapter.at[slot].set(adapter),
    )


def release(occupancy: Occupancy, slot: jax.Array) -> Occupancy:
    """Empties a slot, so that its pages can be reused."""
    return Occupancy(
        length=occupancy.length.at[slot].set(1),
        anchor=occupancy.anchor.at[slot].set(0),
        active=occupancy.active.at[slot].set(False),
        # An empty slot is greedy, so that a batch of greedy sequences skips all noise.
        temperature=occupancy.temperature.at[slot].set(0),
        page_table=occupancy.page_table.at[slot].set(0),
    )


def set_pages(state: DecodeState, table: jax.Array) -> DecodeState:
    """Replaces the page table, int32 [B, M]."""
    cache = dataclasses.replace(state.cache, page_table=table)
    return dataclasses.replace(state, cache=cache)


def generate(shapes: Shapes, bucket: int | None = None, *, greedy: bool = False) -> Callable:
    """Returns a dispatch over the first `bucket` slots of each replica; None for all slots.

    `greedy` is as in `Engine.generate`.
    """
    rules = shapes.rules.for_greedy() if greedy else shapes.rules
    entry = shapes.layout.bucket_sizes.index(bucket or shapes.layout.slots_per_replica)

    def run(target: Decoder, drafter: Drafter, state: DecodeState, max_idle: jax.Array):
        lengths = timing.timed_lengths(shapes.layout.max_length)
        timed = state.choice.timed(entry, state.mean_length(), lengths)
        state = dataclasses.replace(state, choice=timed)
        return dispatch.run_cycles(
            target,
            drafter,
            state,
            max_cycles=shapes.config.sync_every,
            rules=rules,
            max_idle=max_idle,
        )

    if bucket is None:
        return run
    return batch_buckets.over_first_slots(run, shapes.state(bucket), shapes.layout.num_replicas)


def occupied(shapes: Shapes) -> Callable:
    """Returns `timing.occupy` for the engine's layout and default sampling."""
    return functools.partial(
        timing.occupy,
        layout=shapes.layout,
        sampling=RequestSampling.from_config(shapes.config),
        vocab_size=shapes.vocab_size,
    )


# --- prompts ------------------------------------------------------------------------------------


def prefill(
    target: Decoder,
    drafter: Drafter,
    cache,
    prefill_state,
    chunk: ChunkInputs,
    constraints,
    sampling,
) -> tuple:
    """Runs one chunk of each prompt; see `prefill_chunk`."""
    sampling = sampling.with_keys()
    return prefill_chunk(target, drafter, cache, prefill_state, chunk, sampling, constraints)


def unconstrained(shapes: Shapes, count: int) -> first_token.FirstTokenConstraints:
    """Creates the constraints of unconstrained sequences on the device.

    They stay there, so that they are not transferred on every call.
    """
    default = first_token.unconstrained(count, shapes.layout.max_length, shapes.vocab_size)
    return jax.tree.map(jnp.asarray, default)


# --- the prefix cache ---------------------------------------------------------------------------


def store(shapes: Shapes, context: Any, state: Any, slot, pages, end) -> Any:
    """Copies a slot's rows of the drafter's state to pages.

    Args:
      context: Pages of the drafter's rows.
      state: The drafter's state.
      slot: Slot to copy from.
      pages: Pages to copy to, int32 [M]; 0 (scratch) for rows to skip.
      end: Number of pages.
    """
    size, slots = shapes.layout.page_size, shapes.layout.slots_per_replica
    replica, mine = slot // slots, slot % slots

    def put(i, context):
        rows = shapes.drafter.read_rows(state, mine, i * size, size)
        return jax.tree.map(lambda pool, new: pool.at[pages[i]].set(new), context, rows)

    is_mine = replica == shapes.sharding.index("pages")
    return jax.lax.fori_loop(0, jnp.where(is_mine, end, 0), put, context)


def restore(shapes: Shapes, prefill_state: Any, context: Any, prefill_slot, pages, end) -> Any:
    """Copies pages to the first rows of a prefill slot.

    Args:
      prefill_state: The drafter's state of the prompts in prefill.
      context: Pages of the drafter's rows.
      prefill_slot: Prefill slot to copy to.
      pages: Pages to copy from, int32 [M].
      end: Number of pages.
    """
    size = shapes.layout.page_size
    is_mine = prefill_slot == shapes.sharding.index("pages")

    def put(i, prefill_state):
        rows = jax.tree.map(lambda pool: pool[pages[i]], context)
        return shapes.drafter.write_rows(prefill_state, jnp.int32(0), i * size, rows)

    prefill_state = shapes.drafter.clear(prefill_state, jnp.reshape(is_mine, (1,)))
    return jax.lax.fori_loop(0, jnp.where(is_mine, end, 0), put, prefill_state)


def replay(target: Decoder, drafter: Drafter, prefill_state: Any, chunk: ChunkInputs) -> Any:
    """Lets the drafter observe cached tokens again; see `replay_chunk`."""
    return replay_chunk(drafter, prefill_state, chunk, target)


# --- non-finite logits --------------------------------------------------------------------------


def new_examined(shapes: Shapes) -> Any:
    """Creates the cache of one sequence that is examined alone; it owns all pages but scratch."""
    cache = zeros(shapes.examined())
    table = jnp.arange(1, cache.page_table.shape[1] + 1, dtype=jnp.int32)[None]
    return dataclasses.replace(cache, page_table=table)
