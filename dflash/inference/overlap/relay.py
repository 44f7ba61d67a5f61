"""Relay: stands in the target's programs for a drafter that runs on other devices.

The target's programs are those of any drafter. A relay proposes what the drafter has sent, and
keeps what the drafter has to observe, for the host to send.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mail:
    """Rows for the drafter of B sequences to observe; see `Drafter.observe`.

    Attributes:
      position: Position of the first row, int32 [B].
      tokens: Tokens of the rows, and the token after them, int32 [B, T + 1].
      num_committed: Number of valid rows, int32 [B].
      features: Features of the rows, [B, T, C·D].
    """

    position: jax.Array
    tokens: jax.Array
    num_committed: jax.Array
    features: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """State of a relay during one cycle: what it proposes, and what it keeps."""

    proposal: Proposal
    mail: Mail


class Relay(Drafter):
    """Drafter that proposes what it was given; it has no state between cycles."""

    def __init__(self, drafter: Drafter, num_draft_tokens: int):
        """Takes the static attributes of a drafter, with another number of drafts."""
        self.feature_layers = drafter.feature_layers
        self.num_draft_tokens = num_draft_tokens
        self.is_tree = drafter.drafts_trees
        self.path = drafter.longest_path

    @property
    def longest_path(self) -> int:
        """Rows on the longest path, anchor included."""
        return self.path if self.is_tree else self.block_size

    def init_state(self, batch: int, max_length: int) -> Any:
        """Returns the state between cycles, which is empty."""
        return ()

    def proposal(self, batch: int, place: Callable[..., Any]) -> Proposal:
        """Returns the abstract proposal of `batch` sequences; `place` makes (shape) an array."""
        tokens = place((batch, self.num_draft_tokens))
        return Proposal(tokens, tokens if self.is_tree else None)

    def mail(
        self, batch: int, rows: int, width: int, dtype: jnp.dtype, place: Callable[..., Any]
    ) -> Mail:
        """Returns abstract mail of `rows` rows with `width` features; `place` makes arrays."""
        count = place((batch,))
        return Mail(count, place((batch, rows + 1)), count, place((batch, rows, width), dtype))

    def draft(self, state: Exchange, anchor, position, sampler, heads):
        """Returns the proposal of the other devices."""
        return state.proposal, state

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Keeps the rows; without a state (in prefill), returns them alone."""
        mail = Mail(position, tokens, num_committed, features)
        return mail if state == () else dataclasses.replace(state, mail=mail)
