"""No drafting: plain decoding, in the same loop as every strategy that it is compared with."""

import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal


class NoDrafter(Drafter):
    """Proposes nothing, so that every cycle commits the one token that the target supplies."""

    prefix_cache_mode = "rows"  # of which there are none

    def init_state(self, batch, max_length):
        """There is no state."""
        return ()

    def draft(self, state, anchor, position, sampler, heads):
        """An empty proposal: tokens int32 [B, 0]."""
        return Proposal(jnp.zeros((anchor.shape[0], 0), jnp.int32)), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Nothing to keep."""
        return state
