"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens.

Source: prompt lookup decoding (Saxena 2023). Here it runs on the device: the committed tokens are
the state, and the search compares all positions at once. The drafter has no weights.
"""

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.ngram_config import NgramConfig
from dflash.layers.cache import batch_axes
from dflash.parallel.sharding import Sharding


class Ngram(Drafter):
    """Prompt-lookup drafter, whose state is the tokens before the anchor, int32 [B, L]."""

    prefix_cache_mode = "tokens"

    def __init__(self, *, block_size: int, longest_match: int, sharding: Sharding):
        """Sets the sizes of the draft and of the search.

        Args:
          block_size: Number of rows that the target verifies, anchor included.
          longest_match: Maximum number of trailing tokens to search for.
        """
        self.num_draft_tokens = block_size - 1
        self.longest_match = longest_match
        self.sharding = sharding

    @classmethod
    def create(cls, config: NgramConfig, hf, target, *, dtype, sharding):
        return cls(
            block_size=config.block_size, longest_match=config.longest_match, sharding=sharding
        )

    def init_state(self, batch, max_length):
        """Returns abstract token ids, with room for a whole block past the last position."""
        name, _ = batch_axes(batch, self.sharding)
        shape = (batch, max_length + self.block_size)
        return self.sharding.abstract(shape, (name, None), jnp.int32)

    def draft(self, state, anchor, position, sampler, heads):
        token_ids = jax.vmap(put)(state, anchor[:, None], position)
        tokens = copy_last(token_ids, position, self.longest_match, self.num_draft_tokens)
        return Proposal(tokens), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        return jax.vmap(put)(state, tokens[:, :-1], position)


def copy_last(token_ids: jax.Array, end: jax.Array, longest: int, count: int) -> jax.Array:
    """Returns the `count` tokens after the match of `find_last`, int32 [B, count]."""
    source = find_last(token_ids, end, longest)
    # The copy repeats with this period, because past the end it would read its own tokens.
    period = (end - source)[:, None]
    offsets = jnp.arange(count) % period
    return jnp.take_along_axis(token_ids, source[:, None] + 1 + offsets, axis=1)


def find_last(token_ids: jax.Array, end: jax.Array, longest: int) -> jax.Array:
    """Finds an earlier occurrence of each sequence's last tokens.

    Returns the longest match, of 1 to `longest` tokens, and among equally long ones the last.

    Args:
      token_ids: int32 [B, L]; tokens past `end` are ignored.
      end: Position of the last token, int32 [B].
      longest: Maximum number of tokens to compare. The size of the program is linear in it.
    Returns:
      Position of the match's last token, int32 [B], below `end`. It is end - 1 if nothing matches,
      so that the draft repeats the last token.
    """
    length = token_ids.shape[1]
    positions = jnp.arange(length)
    matches = jnp.ones(token_ids.shape, bool)
    match_lengths = jnp.zeros(token_ids.shape, jnp.int32)
    for back in range(longest):
        token = jnp.take_along_axis(token_ids, jnp.maximum(end - back, 0)[:, None], axis=1)
        matches &= (jnp.roll(token_ids, back, axis=1) == token) & (positions >= back)
        match_lengths += matches
    # Order positions before the end by match length, then by position.
    rank = match_lengths * length + positions
    rank = jnp.where(positions < end[:, None], rank, -1)
    best = jnp.argmax(rank, axis=1)
    return jnp.where(end > 0, best, -1).astype(jnp.int32)


def put(row: jax.Array, tokens: jax.Array, position: jax.Array) -> jax.Array:
    """Writes tokens [T] into row [L] from `position` on."""
    return jax.lax.dynamic_update_slice(row, tokens, (position,))
