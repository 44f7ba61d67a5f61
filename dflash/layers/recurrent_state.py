"""Recurrent state of linear attention: stored per sequence, not per position.

A verified block does not change the state. It is kept as `PendingState` until the accepted rows are
known, and `commit` advances the state by these rows alone.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.kernels import implementation
from dflash.kernels.delta_block import commit_block
from dflash.kernels.gated_delta import Block
from dflash.parallel.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class RecurrentSpec:
    """Specification of the state that a layer keeps for each sequence.

    Attributes:
      heads: Value heads, which are sharded by the logical axis "heads".
      key_width: Elements of a key, the first dimension of a head's state.
      value_width: Elements of a value, the second dimension.
      num_rows: Rows before the next one that the convolution reads.
      channels: Elements of such a row; they are sharded with the heads.
      dtype: Dtype of these rows; the state of a head is float32.
    """

    heads: int
    key_width: int
    value_width: int
    num_rows: int
    channels: int
    dtype: jnp.dtype

    def abstract(self, batch: int, batch_name: str | None, sharding: Sharding) -> "RecurrentState":
        """Returns the abstract state of `batch` sequences; zeros are that of empty sequences."""
        memory = batch, self.heads, self.key_width, self.value_width
        rows = batch, self.num_rows, self.channels
        memory_names, rows_names = _names(batch_name)
        return RecurrentState(
            sharding.abstract(memory, memory_names, jnp.float32),
            sharding.abstract(rows, rows_names, self.dtype),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """State of one layer after the committed positions of B sequences.

    Attributes:
      memory: float32 [B, heads, key width, value width].
      rows: [B, num_rows, channels]; latest rows before the convolution, the latest last.
    """

    memory: jax.Array
    rows: jax.Array

    def take(
        self, slots: jax.Array, fresh: jax.Array, batch: str | None, sharding: Sharding
    ) -> "RecurrentState":
        """Returns the state of some slots.

        Args:
          slots: int32 [n]; each counts within its device's shard of the slots.
          fresh: bool [n]; sequences that begin, whose state is zero.
          batch: Logical axis of slots and sequences.
        """

        def take(memory, rows, slots, fresh):
            is_fresh = fresh[:, None, None]
            return (
                jnp.where(is_fresh[..., None], 0, memory[slots]),
                jnp.where(is_fresh, 0, rows[slots]),
            )

        names = [*_names(batch), (batch,), (batch,)]
        state = sharding.map(take, names, names[:2])(self.memory, self.rows, slots, fresh)
        return RecurrentState(*state)

    def put(
        self, other: "RecurrentState", slots: jax.Array, batch: str | None, sharding: Sharding
    ) -> "RecurrentState":
        """Replaces the state of some slots by `other`; see `take`."""

        def put(memory, rows, new_memory, new_rows, slots):
            return memory.at[slots].set(new_memory), rows.at[slots].set(new_rows)

        names = _names(batch)
        arrays = self.memory, self.rows, other.memory, other.rows, slots
        return RecurrentState(*sharding.map(put, [*names, *names, (batch,)], names)(*arrays))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingState:
    """State before a verified block, with what its rows would add.

    Attributes:
      rows: [B, T, ·]; rows of the block before the convolution, in the first `channels` columns of
        each device.
    """

    state: RecurrentState
    block: Block
    rows: jax.Array

    def commit(
        self, count: jax.Array, path: jax.Array | None, batch: str | None, sharding: Sharding
    ) -> RecurrentState:
        """Returns the state after the accepted rows.

        Args:
          count: int32 [B]; number of accepted rows.
          path: int32 [B, R]; row of the block at each depth of the accepted path. None is a chain.
          batch: Logical axis of the sequences.
        """

        chosen = implementation.for_platform(sharding.platform)

        def commit(memory, before, keys, updates, log_decay, rows, count, path):
            block = Block(keys, updates, log_decay)
            return commit_block(memory, before, block, rows, count, path, implementation=chosen)

        names = _names(batch)
        arrays = self.state.memory, self.state.rows, *self.block, self.rows, count, path
        arguments = [*names, *block_names(batch), (batch,), (batch, None)]
        return RecurrentState(*sharding.map(commit, arguments, names)(*arrays))


def block_names(batch: str | None) -> list[tuple[str | None, ...]]:
    """Returns the logical axes of a block's keys, updates and decays, and of its rows."""
    return [(batch, None, "heads")] * 4


def _names(batch: str | None) -> list[tuple[str | None, ...]]:
    return [(batch, "heads", None, None), (batch, None, "heads")]
