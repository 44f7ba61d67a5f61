"""Drafter on the target's devices: it proposes drafts from elsewhere, and hands rows on."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal
from dflash.models.decoder import Decoder
from dflash.parallel.sharding import Sharding


class Rows(NamedTuple):
    """Rows of B sequences to observe; see the arguments of `Drafter.observe`."""

    position: jax.Array
    tokens: jax.Array
    num_committed: jax.Array
    features: jax.Array

    def first(self, count: int) -> "Rows":
        """Returns the first `count` rows of each sequence."""
        tokens, features = self.tokens[:, : count + 1], self.features[:, :count]
        return self._replace(tokens=tokens, features=features)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelayState:
    """Drafts to propose, see `drafting`, and the rows of the last cycle or prefill chunk."""

    ranked: jax.Array
    rows: Rows


class Relay(Drafter):
    """Drafter that proposes the drafts in its state, and observes by keeping the newest rows."""

    def __init__(self, drafter: Drafter, target: Decoder, fan_out: int, longest_chunk: int):
        """Takes the place of a drafter of chains, all of whose drafts but the last are verified.

        `fan_out` is as in `OverlappedEngine`; a prompt runs `longest_chunk` rows at once at most.
        """
        self.feature_layers = drafter.feature_layers
        self.num_draft_tokens = drafter.num_draft_tokens - 1
        self.width, self.dtype = len(drafter.feature_layers) * target.arch.hidden_size, target.dtype
        self.sharding, self.fan_out, self.longest_chunk = target.sharding, fan_out, longest_chunk

    def init_state(self, batch: int, max_length: int) -> RelayState:
        """Returns an abstract state, which every device holds whole."""
        return self.state(batch, self.sharding)

    def state(self, batch: int, sharding: Sharding) -> RelayState:
        """Returns an abstract state on the devices of a sharding.

        As many sequences as there are replicas may be prompts, which need room for a chunk.
        """

        def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return sharding.abstract(shape, (None,) * len(shape), dtype)

        prompts, count = batch == self.sharding.size("pages"), self.block_size
        size = max(self.longest_chunk, count) if prompts else count
        features = array(batch, size, self.width, dtype=self.dtype)
        rows = Rows(array(batch), array(batch, size + 1), array(batch), features)
        return RelayState(array(batch, count, self.fan_out + 1), rows)

    def draft(self, state, anchor, position, sampler, heads):
        """Returns the drafts of the other devices."""
        return Proposal(state.ranked[:, :-1, 0]), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Keeps the rows."""
        tokens = jax.lax.dynamic_update_slice(state.rows.tokens, tokens, (0, 0))
        features = jax.lax.dynamic_update_slice(state.rows.features, features, (0, 0, 0))
        return RelayState(state.ranked, Rows(position, tokens, num_committed, features))

    def insert(self, state, other, row, slot):
        """Returns the state unchanged: the next `observe` replaces all its rows."""
        return state
