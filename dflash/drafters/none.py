"""Plain decoding without drafts, in the same loop as the strategies that it is compared with."""

import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal


class NoDrafter(Drafter):
    """Drafter without drafts, so that every cycle commits only the target's bonus token."""

    prefix_cache_mode = "rows"  # The state is empty, so a hit restores all of it.

    def init_state(self, batch, max_length):
        """Returns an empty state."""
        return ()

    def draft(self, state, anchor, position, sampler, heads):
        """Returns an empty proposal, tokens int32 [B, 0], and the state."""
        return Proposal(jnp.zeros((anchor.shape[0], 0), jnp.int32)), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Returns the empty state."""
        return state
