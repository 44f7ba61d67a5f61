"""Prompt lookup: drafts what followed the last tokens when the text held them before.

Source: prompt lookup decoding (Saxena 2023), here on the device: the text so far is the state, and
the search compares all of its positions at once. It has no weights.
"""

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.ngram_config import NgramConfig
from dflash.layers.cache import batch_axes
from dflash.parallel.sharding import Sharding


class Ngram(Drafter):
    """The drafter; its state is the text before the anchor, int32 [B, L]."""

    prefix_cache_mode = "tokens"

    def __init__(self, *, block_size: int, longest_match: int, sharding: Sharding):
        """Args: longest_match: most tokens at the end of the text that are searched for."""
        self.num_draft_tokens = block_size - 1
        self.longest_match = longest_match
        self.sharding = sharding

    @classmethod
    def create(cls, config: NgramConfig, hf, target, *, dtype, sharding):
        """A drafter without weights; see `Drafter.create`."""
        return cls(
            block_size=config.block_size, longest_match=config.longest_match, sharding=sharding
        )

    def init_state(self, batch, max_length):
        """Abstract text; `observe` may write a whole block from the last position on."""
        name, _ = batch_axes(batch, self.sharding)
        shape = (batch, max_length + self.block_size)
        return self.sharding.abstract(shape, (name, None), jnp.int32)

    def draft(self, state, anchor, position, sampler, heads):
        """Copies what followed the last occurrence; see `Drafter.draft`."""
        text = jax.vmap(_put)(state, anchor[:, None], position)
        source = find_last(text, position, self.longest_match)
        # Past the anchor the copy continues with itself, so it repeats.
        period = (position - source)[:, None]
        offsets = jnp.arange(self.num_draft_tokens) % period
        tokens = jnp.take_along_axis(text, source[:, None] + 1 + offsets, axis=1)
        return Proposal(tokens), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Appends the rows' tokens; see `Drafter.observe`."""
        return jax.vmap(_put)(state, tokens[:, :-1], position)


def find_last(text: jax.Array, end: jax.Array, longest: int) -> jax.Array:
    """Finds the last tokens of each text earlier in it.

    Takes the longest match, of 1 to `longest` tokens; of several as long, the last one.

    Args:
      text: int32 [B, L]; tokens past `end` are ignored.
      end: int32 [B]; position of the last token.
      longest: most tokens that are compared; the program grows with it.
    Returns:
      int32 [B]; position of the match's last token, below `end`. end - 1 if nothing matches, so
      that the last token is the one that followed.
    """
    positions = jnp.arange(text.shape[1])
    run = jnp.ones(text.shape, bool)
    lengths = jnp.zeros(text.shape, jnp.int32)
    for back in range(longest):
        wanted = jnp.take_along_axis(text, jnp.maximum(end - back, 0)[:, None], axis=1)
        run &= (jnp.roll(text, back, axis=1) == wanted) & (positions >= back)
        lengths += run
    # The largest of (length, position), among positions before the end.
    rank = lengths * text.shape[1] + positions
    rank = jnp.where(positions < end[:, None], rank, -1)
    found = jnp.argmax(rank, axis=1)
    return jnp.where(end > 0, found, -1).astype(jnp.int32)


def _put(row: jax.Array, tokens: jax.Array, position: jax.Array) -> jax.Array:
    """Writes tokens [T] into row [L] from `position` on."""
    return jax.lax.dynamic_update_slice(row, tokens, (position,))
