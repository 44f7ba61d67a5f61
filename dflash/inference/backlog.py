"""Committed rows that a drafter has not observed yet.

While nothing is drafted nobody asks the drafter anything, and many rows at once cost it little more
than one. So plain cycles put their rows aside, and the drafter catches up when the backlog is full
or drafting begins again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Heads
from dflash.parallel.sharding import Sharding

ROWS = 32  # most rows put aside


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Backlog:
    """The last `count` rows before each anchor's position; W rows have room.

    Attributes:
      count: int32 [B], in [0, W].
      tokens: int32 [B, W + 1]; row i holds tokens[:, i] and is followed by tokens[:, i + 1].
      features: [B, W, C·D]; of the rows.
    """

    count: jax.Array
    tokens: jax.Array
    features: jax.Array

    def pending(self, active: jax.Array) -> jax.Array:
        """int32 [B]; rows that an active sequence's drafter state lacks."""
        return jnp.where(active, self.count, 0)

    def append(self, tokens: jax.Array, num_committed: jax.Array, features: jax.Array) -> "Backlog":
        """Puts one row of each sequence aside; there must be room.

        Args:
          tokens: int32 [B, 2]; the row's token and the one that follows it.
          num_committed: int32 [B]; 0 for a row that does not count.
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
        """Shows the drafter all rows.

        Args:
          drafter: of the state.
          state: the drafter's; covers the positions before position - count.
          anchor: int32 [B]; the token after the last row.
          position: int32 [B]; of the anchors.
          active: bool [B]; other sequences' rows count for nothing.
          heads: the target's embedding and output head.
        Returns:
          the drafter's state, covering the positions before `position`, and an empty backlog.
        """
        count = self.pending(active)
        start = position - count
        # A sequence without rows has its anchor first, as everywhere: some drafters run it at once.
        tokens = jnp.where(jnp.arange(ROWS + 1) == count[:, None], anchor[:, None], self.tokens)
        state = drafter.observe(state, start, tokens, count, self.features, heads)
        return state, dataclasses.replace(self, count=jnp.zeros_like(self.count))


def abstract(batch: int, width: int, dtype: jnp.dtype, sharding: Sharding) -> Backlog:
    """An empty backlog to be, when filled with zeros.

    Args:
      batch: B.
      width: C·D, of the features.
      dtype: of the features.
      sharding: where it lives.
    """
    return Backlog(
        count=sharding.abstract((batch,), ("batch",), jnp.int32),
        tokens=sharding.abstract((batch, ROWS + 1), ("batch", None), jnp.int32),
        features=sharding.abstract((batch, ROWS, width), ("batch", None, None), dtype),
    )
