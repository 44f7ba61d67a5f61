"""Replays recorded acceptance lengths while all the work of drafting is done.

Drafts of random weights are never accepted, so their speed means nothing. With the acceptance
lengths of a real pair replayed, a cycle costs and commits what it would with real weights.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.drafters.base import Drafter, Proposal
from dflash.inference import verify
from dflash.inference.verify import VerifyResult
from dflash.layers import cache as kv
from dflash.parallel.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Place:
    """Where each slot is in a script.

    Attributes:
      cycle: int32 [B]; cycles that its sequence has seen.
      row: int32 [B]; the sequence's row.
      taken: int32 []; rows that sequences have begun.
    """

    cycle: jax.Array
    row: jax.Array
    taken: jax.Array


class Script(nnx.Variable):
    """Acceptance lengths by sequence and cycle."""


class Forced(Drafter):
    """A drafter whose drafts are accepted as far as a script says.

    The script has a row for each sequence, in the order in which they are inserted into a state.
    """

    def __init__(self, inner: Drafter, *, sequences: int, cycles: int, sharding: Sharding):
        """Takes the drafter.

        Args:
          inner: does all the work.
          sequences: rows of the longest script.
          cycles: columns of the longest script; from its end on, a cycle commits one token.
        """
        self.inner = inner
        self.feature_layers = inner.feature_layers
        self.num_draft_tokens = inner.num_draft_tokens
        self.has_probs = inner.has_probs
        self.sharding = sharding
        self._place = sharding.abstract((sequences, cycles + 1), (None, None), jnp.int32)
        self.script = Script(jnp.ones(self._place.shape, jnp.int32, device=self._place.sharding))

    @property
    def longest_path(self) -> int:
        """The drafter's own."""
        return self.inner.longest_path

    def follow(self, lengths: Sequence[Sequence[int]]) -> None:
        """Takes a script: the acceptance lengths of each sequence to come, in order."""
        script = np.ones(self._place.shape, np.int32)
        for sequence, row in enumerate(lengths):
            row = row[: script.shape[1] - 1]
            script[sequence, : len(row)] = row
        self.script.set_value(jax.device_put(script, self._place.sharding))

    def init_state(self, batch, max_length):
        """The drafter's own state; how far each slot is in which row; how many rows were taken."""
        name, _ = kv.batch_axes(batch, self.sharding)
        per_slot = self.sharding.abstract((batch,), (name,), jnp.int32)
        taken = self.sharding.abstract((), (), jnp.int32)
        return self.inner.init_state(batch, max_length), Place(per_slot, per_slot, taken)

    def draft(self, state, anchor, position, sampler, heads):
        """The drafter's own draft; counts the cycle."""
        inner, place = state
        proposal, inner = self.inner.draft(inner, anchor, position, sampler, heads)
        if proposal.parents is not None:
            raise errors.ConfigError(
                f"{type(self.inner).__name__} drafts trees; acceptance lengths can be forced "
                "upon chains only: leave the strategy out"
            )
        return proposal, (inner, dataclasses.replace(place, cycle=place.cycle + 1))

    def revise(self, state, result: VerifyResult) -> VerifyResult:
        """The result on the draft of the cycle that `state` has just counted, as scripted."""
        script, place = self.script.get_value(), state[1]
        now = jnp.minimum(place.cycle - 1, script.shape[1] - 1)
        return verify.force(result, script[place.row, now] - 1)

    def observe(self, state, position, tokens, num_committed, features, heads):
        """As the drafter does."""
        inner, place = state
        inner = self.inner.observe(inner, position, tokens, num_committed, features, heads)
        return inner, place

    def review(self, state, proposal, sampled):
        """As the drafter does."""
        inner, place = state
        return self.inner.review(inner, proposal, sampled), place

    def clear(self, state, fresh):
        """As the drafter does."""
        inner, place = state
        return self.inner.clear(inner, fresh), place

    def insert(self, state, other, row, slot):
        """As the drafter does; the sequence begins the next row of the script."""
        inner = self.inner.insert(state[0], other[0], row, slot)
        place, last = state[1], self._place.shape[0] - 1
        row = place.row.at[slot].set(jnp.minimum(place.taken, last))
        return inner, Place(place.cycle.at[slot].set(0), row, place.taken + 1)


class Canned(Drafter):
    """Always proposes the same, at no cost: the rest of the cycle is the target's part."""

    def __init__(self, proposal: Proposal, drafter: Drafter):
        """Args: drafter: whose proposal it is, and in whose form it is verified."""
        leaves, self.form = jax.tree.flatten(proposal)
        self.leaves = nnx.List(nnx.Variable(leaf) for leaf in leaves)
        self.feature_layers = drafter.feature_layers
        self.num_draft_tokens = drafter.num_draft_tokens
        self.has_probs = drafter.has_probs
        self._longest_path = drafter.longest_path

    @property
    def longest_path(self) -> int:
        """That of the drafter whose proposal it is."""
        return self._longest_path

    def init_state(self, batch, max_length):
        """An empty state."""
        return ()

    def draft(self, state, anchor, position, sampler, heads):
        """Returns the fixed proposal."""
        return jax.tree.unflatten(self.form, [leaf.get_value() for leaf in self.leaves]), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Keeps nothing."""
        return state
