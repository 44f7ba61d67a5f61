"""Prefill: a prompt's context for target and drafter, chunk by chunk, and its first new token.

Prompts are prefilled in *lanes*, one for each data replica. The target's rows go straight into the
pages that the sequence owns in the cache of the batch. The drafter's state is one of its own until
the prompt is complete: cycles of the batch meanwhile would disturb it in a slot.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter
from dflash.inference import first_token
from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.logprobs import Logprobs
from dflash.inference.sampling import SamplingParams
from dflash.layers.cache import PagedCache
from dflash.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkInputs:
    """The next tokens of the prompts in n lanes, of at most T tokens each.

    Attributes:
      tokens: int32 [n, T]; the chunk's, and padding.
      start: int32 [n]; position of the first one.
      count: int32 [n]; how many are the prompt's; 0 for a lane without a prompt.
      following: int32 [n]; the token after them, or -1 where the target is to draw it.
      fresh: bool [n]; the lane's drafter state is that of another prompt, to be dropped.
      table: int32 [n, M]; pages of each sequence.
    """

    tokens: jax.Array
    start: jax.Array
    count: jax.Array
    following: jax.Array
    fresh: jax.Array
    table: jax.Array


def prefill_chunk(
    target: Decoder,
    drafter: Drafter,
    cache: PagedCache,
    lanes: Any,
    chunk: ChunkInputs,
    sampling: SamplingParams,
    asked: FirstTokenConstraints,
) -> tuple[PagedCache, Any, jax.Array, Logprobs]:
    """Runs one chunk of each prompt.

    Args:
      target: the model.
      drafter: observes the rows.
      cache: of the batch; its own page table is left alone.
      lanes: the drafter's state of n sequences.
      chunk: what to run.
      sampling: of the n sequences.
      asked: what they ask of their first tokens.
    Returns:
      cache; lanes; the token after each chunk, int32 [n], or `nonfinite.NO_TOKEN` if its logits
      were not finite; log-probabilities [n] of those that the target has drawn.
    """
    rows = jnp.arange(chunk.tokens.shape[1])
    with jax.named_scope("target"):
        output = target(
            chunk.tokens,
            chunk.start[:, None] + rows,
            dataclasses.replace(cache, page_table=chunk.table),
            feature_layers=drafter.feature_layers,
        )
    last = jnp.maximum(chunk.count - 1, 0)[:, None, None]
    logits = target.unembed(jnp.take_along_axis(output.hidden, last, axis=1))
    end = chunk.start + chunk.count
    drawn, logprobs = first_token.draw(logits, end, sampling, asked)
    following = jnp.where(chunk.following >= 0, chunk.following, drawn)
    lanes = observe_chunk(drafter, lanes, chunk, following, output.features, target)
    cache = dataclasses.replace(output.cache, page_table=cache.page_table)
    return cache, lanes, following, logprobs


def observe_chunk(
    drafter: Drafter,
    lanes: Any,
    chunk: ChunkInputs,
    following: jax.Array,
    features: jax.Array,
    heads: Decoder,
) -> Any:
    """Lets the drafter observe a chunk whose next tokens are `following`: its state.

    Args: see `prefill_chunk` and `Drafter.observe`.
    """
    rows = jnp.arange(chunk.tokens.shape[1] + 1)
    padded = jnp.pad(chunk.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(rows == chunk.count[:, None], following[:, None], padded)
    with jax.named_scope("drafter"):
        lanes = drafter.clear(lanes, chunk.fresh)
        return drafter.observe(lanes, chunk.start, tokens, chunk.count, features, heads)


def replay_chunk(drafter: Drafter, lanes: Any, chunk: ChunkInputs, heads: Decoder) -> Any:
    """Shows cached tokens to a drafter whose state depends on tokens alone.

    Args: see `prefill_chunk`; `chunk.following` is known.
    """
    width = len(drafter.feature_layers) * heads.arch.hidden_size
    features = jnp.zeros((*chunk.tokens.shape, width), heads.dtype)
    return observe_chunk(drafter, lanes, chunk, chunk.following, features, heads)
