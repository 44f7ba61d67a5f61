"""Prefill: the context of a prompt for target and drafter, chunk by chunk, and its first token.

Prompts run in *prefill slots*, one per data replica. The target's rows go straight into the pages
that the sequence owns in the batch's cache. The drafter's state is kept apart until the prompt is
complete, because cycles of the batch would change it in a slot.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash.drafters.base import Drafter
from dflash.inference import first_token
from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.logits.sampling import SamplingParams
from dflash.inference.pages import Layout, Slot
from dflash.inference.request import RequestSampling
from dflash.layers.cache import PagedCache
from dflash.models.decoder import Decoder

GREEDY = RequestSampling()
UNKNOWN = -1  # Placeholder for the token after a chunk that the target samples.


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Tokens of a sequence that one call runs.

    Attributes:
      start: Position of the first token.
      following: Token after the chunk; negative if the target samples it.
      pages: Pages of the sequence, at least up to the end of the chunk.
      fresh: Whether this is the first chunk of the sequence that the drafter observes.
      constraints: Constraints on the sampled token, without a batch axis; None for none.
    """

    tokens: Sequence[int]
    start: int
    following: int
    slot: int
    pages: Sequence[int]
    sampling: RequestSampling
    fresh: bool
    constraints: FirstTokenConstraints | None = None
    adapter: int = 0

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        start: int,
        end: int,
        slot: Slot,
        sampling: RequestSampling,
        *,
        fresh: bool,
        constraints: FirstTokenConstraints | None = None,
        adapter: int = 0,
    ) -> "PrefillChunk":
        """Returns the chunk of tokens start … end - 1 of a sequence."""
        following = token_ids[end] if end < len(token_ids) else UNKNOWN
        constraints = None if end < len(token_ids) else constraints
        return cls(
            token_ids[start:end],
            start,
            following,
            slot.index,
            slot.pages,
            sampling,
            fresh,
            constraints,
            adapter,
        )


# Chunk of an empty prefill slot: its rows go to the scratch page.
IDLE = PrefillChunk((), 0, UNKNOWN, 0, (), GREEDY, fresh=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkInputs:
    """Chunks of n prefill slots, of at most T tokens each.

    Attributes:
      tokens: int32 [n, T]; tokens of the chunks, padded.
      start: int32 [n]; position of the first token.
      count: int32 [n]; number of valid tokens, 0 for an empty prefill slot.
      following: int32 [n]; token after the chunk, or -1 if the target samples it.
      fresh: bool [n]; whether the drafter's state belongs to another prompt and must be cleared.
      slot: int32 [n]; slot of each sequence within its replica.
      table: int32 [n, M]; pages of each sequence.
      adapter: int32 [n]; number of each sequence's adapter, 0 for none.
    """

    tokens: jax.Array
    start: jax.Array
    count: jax.Array
    following: jax.Array
    fresh: jax.Array
    slot: jax.Array
    table: jax.Array
    adapter: jax.Array


def pack(chunks: Mapping[int, PrefillChunk], num_slots: int, layout: Layout) -> ChunkInputs:
    """Returns the chunks of all prefill slots, padded to the size of one program.

    Args:
      chunks: Chunks by prefill slot.
      num_slots: Number n of prefill slots.
    Raises:
      ValueError: A chunk is empty or too long.
    """
    lengths = [len(chunk.tokens) for chunk in chunks.values()]
    shortest, longest = min(lengths), max(lengths)
    if not 0 < shortest <= longest <= layout.longest_chunk:
        raise ValueError(
            f"chunks of {shortest} to {longest} tokens, expected 1 to {layout.longest_chunk}"
        )
    rows = layout.chunk(longest)
    all_chunks = [chunks.get(slot, IDLE) for slot in range(num_slots)]
    return ChunkInputs(
        tokens=np.stack([padded(chunk.tokens, rows) for chunk in all_chunks]),
        start=np.array([chunk.start for chunk in all_chunks], np.int32),
        count=np.array([len(chunk.tokens) for chunk in all_chunks], np.int32),
        following=np.array([chunk.following for chunk in all_chunks], np.int32),
        fresh=np.array([chunk.fresh for chunk in all_chunks]),
        slot=np.array([chunk.slot % layout.slots_per_replica for chunk in all_chunks], np.int32),
        table=np.stack([padded(chunk.pages, layout.prefill_pages) for chunk in all_chunks]),
        adapter=np.array([chunk.adapter for chunk in all_chunks], np.int32),
    )


def padded(numbers: Sequence[int], length: int) -> np.ndarray:
    """Returns the numbers as int32 [length], padded with zeros."""
    row = np.zeros(length, np.int32)
    row[: len(numbers)] = numbers
    return row


def run_chunk(
    target: Decoder,
    feature_layers: tuple[int, ...],
    cache: PagedCache,
    chunk: ChunkInputs,
    sampling: SamplingParams,
    constraints: FirstTokenConstraints,
) -> tuple[PagedCache, jax.Array, Logprobs, jax.Array]:
    """Runs one chunk of each prompt by the target alone.

    Args:
      feature_layers: Layers whose features are returned; see `Drafter`.
      cache: Cache of the batch; its page table is not used and not changed.
    Returns:
      The cache; the token after each chunk, int32 [n], `nonfinite.NO_TOKEN` if its logits are not
      finite; log-probabilities [n] of the sampled tokens; and features of the rows.
    """
    rows = jnp.arange(chunk.tokens.shape[1])
    begins = (chunk.start == 0) & (chunk.count > 0)
    with jax.named_scope("target"):
        output = target(
            chunk.tokens,
            chunk.start[:, None] + rows,
            cache.at_slots(chunk.slot, begins, chunk.table, target.sharding),
            feature_layers=feature_layers,
            count=chunk.count,
            adapters=chunk.adapter,
        )
    last = jnp.maximum(chunk.count - 1, 0)[:, None, None]
    logits = target.unembed(jnp.take_along_axis(output.hidden, last, axis=1))
    end = chunk.start + chunk.count
    drawn, logprobs = first_token.draw(logits, end, sampling, constraints)
    following = jnp.where(chunk.following >= 0, chunk.following, drawn)
    cache = cache.with_slots(output.cache, chunk.slot, target.sharding)
    return cache, following, logprobs, output.features


def prefill_chunk(
    target: Decoder, drafter: Drafter, cache: PagedCache, prefill_state: Any, chunk, *of_prompts
) -> tuple[PagedCache, Any, jax.Array, Logprobs]:
    """Runs one chunk of each prompt, which the drafter observes.

    Args:
      prefill_state: The drafter's state of the n sequences.
      *of_prompts: Further arguments of `run_chunk`.
    Returns:
      The cache; the prefill state; and the token after each chunk with its log-probabilities, as
      `run_chunk` returns them.
    """
    layers = drafter.feature_layers
    cache, following, logprobs, features = run_chunk(target, layers, cache, chunk, *of_prompts)
    prefill_state = observe_chunk(drafter, prefill_state, chunk, following, features, target)
    return cache, prefill_state, following, logprobs


def observe_chunk(
    drafter: Drafter,
    prefill_state: Any,
    chunk: ChunkInputs,
    following: jax.Array,
    features: jax.Array,
    heads: Decoder,
) -> Any:
    """Lets the drafter observe a chunk, and returns its state.

    Args:
      chunk: Chunks that the target has run.
      following: Token after each chunk, int32 [n].
      features: Features of the chunk's rows; see `Drafter.observe`.
    """
    rows = jnp.arange(chunk.tokens.shape[1] + 1)
    padded = jnp.pad(chunk.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(rows == chunk.count[:, None], following[:, None], padded)
    with jax.named_scope("drafter"):
        prefill_state = drafter.clear(prefill_state, chunk.fresh)
        return drafter.observe(prefill_state, chunk.start, tokens, chunk.count, features, heads)


def replay_chunk(drafter: Drafter, prefill_state: Any, chunk: ChunkInputs, heads: Decoder) -> Any:
    """Lets a drafter whose state depends only on tokens observe a chunk of cached tokens."""
    width = len(drafter.feature_layers) * heads.arch.hidden_size
    features = jnp.zeros((*chunk.tokens.shape, width), heads.dtype)
    return observe_chunk(drafter, prefill_state, chunk, chunk.following, features, heads)
