"""Prefill: a prompt's context for target and drafter, and its first new token."""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter
from dflash.inference import first_token
from dflash.inference.state import Prefix
from dflash.models.decoder import Decoder


def prefill_chunk(
    target: Decoder,
    drafter: Drafter,
    prefix: Prefix,
    tokens: jax.Array,
    count: jax.Array,
    following: jax.Array,
) -> Prefix:
    """Runs one chunk of a prompt.

    Args:
      tokens: int32 [1, T], of which `count` are the prompt's.
      following: the prompt's next token, or -1 if this chunk is the last: then the target draws it.
    """
    start = prefix.length
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    with jax.named_scope("target"):
        output = target(tokens, positions, prefix.cache, feature_layers=drafter.feature_layers)
    last = jnp.reshape(count - 1, (1, 1, 1))
    logits = target.unembed(jnp.take_along_axis(output.hidden, last, axis=1))
    length = start + count
    drawn, logprobs = first_token.draw(
        logits, length, prefix.sampling, prefix.controls, prefix.allowed
    )
    anchor = jnp.where(following >= 0, following, drawn)
    shifted = jnp.concatenate([tokens, jnp.zeros((1, 1), jnp.int32)], axis=1)
    shifted = shifted.at[0, count].set(anchor[0])
    with jax.named_scope("drafter"):
        state = drafter.observe(
            prefix.drafter, start, shifted, count[None], output.features, target
        )
    return dataclasses.replace(
        prefix, length=length, anchor=anchor, logprobs=logprobs, cache=output.cache, drafter=state
    )
