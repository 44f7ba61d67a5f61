"""Copies of the context in place of drafts, while they are accepted more often.

Outputs that repeat parts of their context, as edits of a text do, are copied better than drafted.
Both proposals are compared with the committed tokens of every cycle, whichever was verified, so a
sequence changes from one to the other as soon as the other would have been accepted further.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.drafters import ngram
from dflash.drafters.base import Proposal
from dflash.drafters.parts.bandit import Counts
from dflash.drafters.wrappers.wrapper import Wrapper, WrapperState

LONGEST_MATCH = 4  # Trailing tokens that are searched for, as in the default of `ngram`.
FADE = 0.5  # What is left of earlier cycles' acceptance after each cycle.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CopyState:
    """History and both proposals of each sequence: index 0 is the drafter's, index 1 the copy.

    Attributes:
      token_ids: int32 [B, L]; tokens before the anchor.
      drafts: int32 [B, 2, G]; proposals of the current cycle.
      count: int32 [B]; number of drafts to compare; 0 after a cycle without a draft.
      accepted: Counts of cycles, and of drafts that would have been accepted in them, [B, 2].
    """

    token_ids: jax.Array
    drafts: jax.Array
    count: jax.Array
    accepted: Counts

    @property
    def copies(self) -> jax.Array:
        """Sequences whose copies are verified in the current cycle, bool [B]."""
        mean = self.accepted.rates(0.0, 1.0)
        return mean[:, 1] > mean[:, 0]


class WithCopies(Wrapper):
    """Drafter of chains beside which the context is copied; a copy has probability 1."""

    has_confidence = False  # Copies have none.

    def init_state(self, batch, max_length):
        """Returns an abstract state, whose history has room for a block past the last position."""
        ints = {"dtype": jnp.int32}
        mean = self.per_sequence(batch, 2, dtype=jnp.float32)
        outer = CopyState(
            self.per_sequence(batch, max_length + self.block_size, **ints),
            self.per_sequence(batch, 2, self.num_draft_tokens, **ints),
            self.per_sequence(batch, **ints),
            Counts(mean, mean),
        )
        return WrapperState(self.inner.init_state(batch, max_length), outer)

    def draft_fewer(self, count, state, anchor, position, sampler, heads):
        """Drafts, and replaces the drafts of sequences whose copies are accepted more often."""
        where = state.inner, anchor, position, sampler, heads
        proposal, inner = self.draft_inner(self.inner, count, *where)
        outer, tokens, probs = state.outer, proposal.tokens, proposal.probs
        token_ids = jax.vmap(ngram.put)(outer.token_ids, anchor[:, None], position)
        copy, copies = ngram.copy_last(token_ids, position, LONGEST_MATCH, count), outer.copies
        drafts = outer.drafts.at[:, :, :count].set(jnp.stack([tokens, copy], axis=1))
        tokens = jnp.where(copies[:, None], copy, tokens)
        if probs is not None:
            certain = jax.nn.one_hot(copy, probs.shape[-1], dtype=probs.dtype)
            probs = jnp.where(copies[:, None, None], certain, probs)
        outer = dataclasses.replace(outer, drafts=drafts, count=jnp.full_like(outer.count, count))
        return Proposal(tokens, probs=probs), state._replace(inner=inner, outer=outer)

    def review(self, state, proposal, sampled):
        """Shows the target's samples to the inner drafter, whose own drafts may have no row."""
        tokens = jnp.where(state.outer.copies[:, None], -1, proposal.tokens)
        proposal = dataclasses.replace(proposal, tokens=tokens)
        return state._replace(inner=self.inner.review(state.inner, proposal, sampled))

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Appends the rows to the history, and compares both proposals with what was committed."""
        inner = self.inner.observe(state.inner, position, tokens, num_committed, features, heads)
        outer, width = state.outer, min(tokens.shape[1] - 1, self.num_draft_tokens)
        known = (outer.count > 0) & (num_committed > 0)
        counted = jnp.arange(width) < jnp.minimum(outer.count, num_committed)[:, None]
        equal = outer.drafts[:, :, :width] == tokens[:, None, 1 : width + 1]
        agreed = jnp.cumprod(equal & counted[:, None], axis=-1).sum(axis=-1)
        news = jax.tree.map(lambda x: x * known[:, None], Counts(jnp.ones(agreed.shape), agreed))
        outer = dataclasses.replace(
            outer,
            token_ids=jax.vmap(ngram.put)(outer.token_ids, tokens[:, :-1], position),
            count=jnp.zeros_like(outer.count),
            accepted=outer.accepted.after(news, jnp.where(known, FADE, 1.0)[:, None]),
        )
        return state._replace(inner=inner, outer=outer)

    def context_pages(self, num_pages, page_size):
        inner = super().context_pages(num_pages, page_size)
        if self.prefix_cache_mode != "rows":  # Tokens that are observed again bring the history.
            return inner
        return inner, self.sharding.abstract((num_pages, page_size), ("pages", None), jnp.int32)

    def read_rows(self, state, slot, start, count):
        history = jax.lax.dynamic_slice(state.outer.token_ids, (slot, start), (1, count))[0]
        return super().read_rows(state, slot, start, count), history

    def write_rows(self, state, slot, start, rows):
        inner, history = rows
        state = super().write_rows(state, slot, start, inner)
        token_ids = state.outer.token_ids
        token_ids = jax.lax.dynamic_update_slice(token_ids, history[None], (slot, start))
        return state._replace(outer=dataclasses.replace(state.outer, token_ids=token_ids))
