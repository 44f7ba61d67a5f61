"""Sequential drafting of a chain: a model runs over each draft before the next is drawn."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dflash.drafters.base import Proposal
from dflash.drafters.parts.sampler import Sampler

Cache = TypeVar("Cache")


def draft(
    hidden: jax.Array,
    cache: Cache,
    position: jax.Array,
    *,
    num_draft_tokens: int,
    logits: Callable[[jax.Array], jax.Array],
    extend: Callable[[jax.Array, jax.Array, Cache, jax.Array], tuple[jax.Array, Cache]],
    sampler: Sampler,
) -> tuple[Proposal, Cache]:
    """Drafts a chain in a scan over steps 0 … G - 1, one token per step.

    Args:
      hidden: Hidden state that predicts the first draft, [B, 1, D].
      cache: Context of the model, to which `extend` adds rows.
      position: Position of the anchor, int32 [B].
      num_draft_tokens: Number of drafts, G.
      logits: Function hidden -> logits float32 [B, 1, V].
      extend: Function (hidden, tokens int32 [B, 1], cache, step) -> (hidden, cache) that runs the
        model over the draft of a step.
    Returns:
      The chain, and the cache with all drafts except the last.
    """

    def choose(hidden, step):
        drawn = sampler.propose(logits(hidden), (position + 1 + step)[:, None])
        return jax.tree.map(lambda rows: rows[:, 0], tuple(drawn))

    def advance(carry, step):
        hidden, token, cache = carry
        hidden, cache = extend(hidden, token[:, None], cache, step)
        token, probs = choose(hidden, step + 1)
        return (hidden, token, cache), (token, probs)

    first = choose(hidden, 0)
    steps = jnp.arange(num_draft_tokens - 1)
    (_, _, cache), rest = jax.lax.scan(advance, (hidden, first[0], cache), steps)
    tokens, probs = jax.tree.map(
        lambda head, tail: jnp.concatenate([head[None], tail]).swapaxes(0, 1), first, rest
    )
    return Proposal(tokens, probs=probs), cache
