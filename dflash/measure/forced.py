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
from dflash.inference.cycle.verify import VerifyResult
from dflash.layers import cache as kv
from dflash.parallel.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptPosition:
    """Position of each slot in the script.

    Attributes:
      cycle: Cycles that the slot's sequence has run, int32 [B].
      row: Row of the script that the sequence follows, int32 [B].
      taken: Number of rows that sequences have started, int32 [].
    """

    cycle: jax.Array
    row: jax.Array
    taken: jax.Array


class Script(nnx.Variable):
    """Acceptance lengths by sequence and cycle, int32 [sequences, cycles + 1]."""


class ForcedDrafter(Drafter):
    """Drafter around another one, whose drafts are accepted as a script prescribes.

    The script has a row for each sequence, in the order in which they are inserted into a state.
    """

    def __init__(self, inner: Drafter, *, sequences: int, cycles: int, sharding: Sharding):
        """Initializes the wrapper with a script of ones.

        Args:
          sequences: Most rows of a script.
          cycles: Most columns of a script; each later cycle commits one token.
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
        return self.inner.longest_path

    def follow(self, lengths: Sequence[Sequence[int]]) -> None:
        """Sets the script: the acceptance lengths of each sequence to come, in order."""
        script = np.ones(self._place.shape, np.int32)
        for sequence, row in enumerate(lengths):
            row = row[: script.shape[1] - 1]
            script[sequence, : len(row)] = row
        self.script.set_value(jax.device_put(script, self._place.sharding))

    def init_state(self, batch, max_length):
        """Returns the state of the inner drafter and the slots' `ScriptPosition`, both abstract."""
        name, _ = kv.batch_axes(batch, self.sharding)
        per_slot = self.sharding.abstract((batch,), (name,), jnp.int32)
        taken = self.sharding.abstract((), (), jnp.int32)
        return self.inner.init_state(batch, max_length), ScriptPosition(per_slot, per_slot, taken)

    def draft(self, state, anchor, position, sampler, heads):
        inner, place = state
        proposal, inner = self.inner.draft(inner, anchor, position, sampler, heads)
        if proposal.parents is not None:
            raise errors.ConfigError(
                f"{type(self.inner).__name__} drafts trees, but acceptance lengths can be forced "
                "only on chains; remove the strategy"
            )
        return proposal, (inner, dataclasses.replace(place, cycle=place.cycle + 1))

    def revise(self, state, result: VerifyResult) -> VerifyResult:
        """Returns the result with the acceptance lengths that the script has for this cycle."""
        script, place = self.script.get_value(), state[1]
        now = jnp.minimum(place.cycle - 1, script.shape[1] - 1)
        # The bonus token stays, so that XLA cannot eliminate the verification.
        return result._replace(num_accepted=script[place.row, now] - 1)

    def observe(self, state, position, tokens, num_committed, features, heads):
        inner, place = state
        inner = self.inner.observe(inner, position, tokens, num_committed, features, heads)
        return inner, place

    def review(self, state, proposal, sampled):
        inner, place = state
        return self.inner.review(inner, proposal, sampled), place

    def clear(self, state, fresh):
        inner, place = state
        return self.inner.clear(inner, fresh), place

    def insert(self, state, other, row, slot):
        """Inserts into the inner state, and starts the sequence on the script's next row."""
        inner = self.inner.insert(state[0], other[0], row, slot)
        place, last = state[1], self._place.shape[0] - 1
        row = place.row.at[slot].set(jnp.minimum(place.taken, last))
        return inner, ScriptPosition(place.cycle.at[slot].set(0), row, place.taken + 1)


class FixedDrafter(Drafter):
    """Drafter that always returns the same proposal, at no cost, to time the target alone."""

    def __init__(self, proposal: Proposal, drafter: Drafter):
        """Initializes the drafter.

        Args:
          drafter: Drafter that made the proposal; determines how it is verified.
        """
        leaves, self.form = jax.tree.flatten(proposal)
        self.leaves = nnx.List(nnx.Variable(leaf) for leaf in leaves)
        self.feature_layers = drafter.feature_layers
        self.num_draft_tokens = drafter.num_draft_tokens
        self.has_probs = drafter.has_probs
        self._longest_path = drafter.longest_path

    @property
    def longest_path(self) -> int:
        return self._longest_path

    def init_state(self, batch, max_length):
        return ()

    def draft(self, state, anchor, position, sampler, heads):
        return jax.tree.unflatten(self.form, [leaf.get_value() for leaf in self.leaves]), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        return state
