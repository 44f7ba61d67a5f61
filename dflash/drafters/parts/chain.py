"""A chain that is drafted token by token: each draft goes through a model before the next."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dflash.drafters.base import Proposal, Sampler

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
    """Drafts in a scan over steps 0 … G - 1, each a token from the hidden state after the last.

    Args:
      hidden: [B, 1, D]; predicts the first draft.
      cache: the model's context, which `extend` adds to.
      position: int32 [B]; of the anchor.
      num_draft_tokens: G.
      logits: hidden -> [B, 1, V].
      extend: (hidden, tokens int32 [B, 1], cache, step) -> hidden and cache with the step's draft.
      sampler: draws the drafts.
    Returns:
      The chain, and the cache with all drafts but the last.
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
        lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), first, rest
    )
    return Proposal(tokens, probs=probs), cache
