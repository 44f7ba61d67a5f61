"""Packing of rows: different numbers of rows per sequence, in an array of a static size.

Layers that treat rows one by one run on packed rows. Attention reads the context of each sequence
once however many rows there are, so that it computes padded rows: padding adds no reads.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Packs the first rows of B sequences of R padded rows into N rows for each of D replicas.

    Replica d owns sequences d · B / D … (d + 1) · B / D - 1, whose rows it packs in order.

    Attributes:
      source: int32 [D, N]; padded row of each packed row, numbered within the replica.
      place: int32 [B, R]; packed row of each padded row, numbered within the replica. The padding
        of a sequence is its last row. A sequence without rows has a single one, another's or N.
    """

    source: jax.Array
    place: jax.Array

    @classmethod
    def of(cls, counts: jax.Array, length: int, total: int, num_replicas: int) -> "Packing":
        """Returns the packing of `counts` rows per sequence.

        Args:
          counts: int32 [B], at most `length` each, and at most `total` in a replica together.
          length: Number of padded rows per sequence, R.
          total: Number of packed rows per replica, N.
          num_replicas: Number of replicas, D.
        """
        by_replica = counts.reshape(num_replicas, -1)
        ends = jnp.cumsum(by_replica, axis=1)
        rows = jnp.arange(total)
        # Packed rows past the last one are copies of padded rows, and are not read.
        owner = jnp.sum(rows[None, :, None] >= ends[:, None], axis=-1)
        owner = jnp.minimum(owner, by_replica.shape[1] - 1)
        begins = ends - by_replica
        row = jnp.minimum(rows - jnp.take_along_axis(begins, owner, axis=1), length - 1)
        # Not the rows of the next sequence: a NaN among them would reach this one.
        place = jnp.minimum(jnp.arange(length), jnp.maximum(counts - 1, 0)[:, None])
        return cls(owner * length + row, begins.reshape(-1, 1) + place)

    def pack(self, rows: jax.Array) -> jax.Array:
        """Returns the packed rows [D, N, …] of padded rows [B, R, …]."""
        # Gather whole rows: a TPU would copy rows of heads to another layout first, and back after.
        by_shard = rows.reshape(self.source.shape[0], -1, math.prod(rows.shape[2:]))
        return _take(by_shard, self.source).reshape(*self.source.shape, *rows.shape[2:])

    def unpack(self, rows: jax.Array) -> jax.Array:
        """Returns the padded rows [B, R, …] of packed rows [D, N, …]."""
        place = self.place.reshape(rows.shape[0], -1)
        return _take(rows, place).reshape(*self.place.shape, *rows.shape[2:])

    def spread(self, values: jax.Array) -> jax.Array:
        """Returns the values [D, N, …] of the packed rows' sequences, given values [B, …]."""
        padded = jnp.broadcast_to(values[:, None], (*self.place.shape, *values.shape[1:]))
        return self.pack(padded)

    def around(self, attend: Callable[..., tuple[jax.Array, Any]]) -> Callable:
        """Returns attention over packed rows, given attention over padded rows."""

        def attend_packed(*rows: Any) -> tuple[jax.Array, Any]:
            attended, auxiliary = attend(*jax.tree.map(self.unpack, rows))
            return self.pack(attended), auxiliary

        return attend_packed


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows[d, min(index[d, i], M - 1)] for rows [D, M, …] and index int32 [D, N]."""
    return jax.vmap(lambda device_rows, at: device_rows.at[at].get(mode="clip"))(rows, index)
