"""Committed rows that a drafter has not observed yet.

While cycles draft nothing, the drafter's state is not read, and observing many rows at once costs
little more than observing one. So plain cycles append their rows to a backlog, which the drafter
observes when it is full or when drafting resumes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Heads
from dflash.parallel.sharding import Sharding

ROWS = 32  # capacity of a backlog


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Backlog:
    """Last `count` rows before each anchor's position, at most W = ROWS.

    Attributes:
      count: int32 [B], in [0, W].
      tokens: int32 [B, W + 1]; row i holds tokens[:, i] and is followed by tokens[:, i + 1].
      features: Features of the rows, [B, W, C·D].
    """

    count: jax.Array
    tokens: jax.Array
    features: jax.Array

    def pending(self, active: jax.Array) -> jax.Array:
        """Returns the number of rows that each active sequence's drafter lacks, int32 [B]."""
        return jnp.where(active, self.count, 0)

    def append(self, tokens: jax.Array, num_committed: jax.Array, features: jax.Array) -> "Backlog":
        """Appends one row of each sequence; the backlog must not be full.

        Args:
          tokens: int32 [B, 2]; the row's token and the one that follows it.
          num_committed: int32 [B]; 0 for a row to be ignored.
          features: [B, 1, C·D].
        """
        write = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new, at, 0))
        return Backlog(
            count=self.count + num_committed,
            tokens=write(self.tokens, tokens, self.count),
            features=write(self.features, features.astype(self.features.dtype), self.count),
        )

    def clear(
        self,
        drafter: Drafter,
        state: Any,
        anchor: jax.Array,
        position: jax.Array,
        active: jax.Array,
        heads: Heads,
    ) -> tuple[Any, "Backlog"]:
        """Lets the drafter observe all rows.

        Args:
          state: State of the drafter, which covers the positions before position - count.
          anchor: int32 [B]; the token after the last row.
          position: int32 [B]; position of each anchor.
          active: bool [B]; rows of other sequences are ignored.
        Returns:
          The drafter's state, covering the positions before `position`, and an empty backlog.
        """
        # The loop that calls this runs once if rows are pending, and not at all otherwise. It does
        # not change the features, so without a barrier XLA would move the work on them out of the
        # loop, to where it would be done in any case.
        count, features = jax.lax.optimization_barrier((self.pending(active), self.features))
        start = position - count
        # The row after the last one is the anchor's. A sequence without rows has the anchor in its
        # first row, which some drafters run at once.
        tokens = jnp.where(jnp.arange(ROWS + 1) == count[:, None], anchor[:, None], self.tokens)
        state = drafter.observe(state, start, tokens, count, features, heads)
        return state, dataclasses.replace(self, count=jnp.zeros_like(self.count))


def spare_rows(sizes: tuple[int, ...]) -> int:
    """Returns the extra rows that a drafter's state needs past the longest sequence."""
    return ROWS if len(sizes) > 1 else 0


def abstract(batch: int, width: int, dtype: jnp.dtype, sharding: Sharding) -> Backlog:
    """Returns an abstract backlog; zeros mean an empty one.

    Args:
      batch: Batch size B.
      width: Width C·D of the features.
    """
    return Backlog(
        count=sharding.abstract((batch,), ("batch",), jnp.int32),
        tokens=sharding.abstract((batch, ROWS + 1), ("batch", None), jnp.int32),
        features=sharding.abstract((batch, ROWS, width), ("batch", None, None), dtype),
    )
