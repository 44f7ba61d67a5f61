"""Device state that chooses a block size for every cycle."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dflash.inference.cycle import backlog, block_choice
from dflash.inference.cycle.backlog import Backlog
from dflash.inference.cycle.block_choice import BlockChoice
from dflash.inference.cycle.choices import WHOLE, Division
from dflash.parallel.sharding import Sharding

PLAIN = 0  # Index of block size 1, at which nothing is drafted.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Choice of the next block size, and the rows that the drafter has not observed yet.

    Attributes:
      choice: Acceptance statistics, and the size of the next cycle.
      backlog: Rows that the drafter has not observed yet.
      seconds: float32 [W, 2, S]; seconds of a cycle for each batch bucket, each of two lengths of
        all sequences (see `timed_lengths`), and each block size or division of rows.
    """

    choice: BlockChoice
    backlog: Backlog
    seconds: jax.Array

    def insert(self, slot: jax.Array) -> "Adaptive":
        """Resets the statistics and the backlog of slot `slot` for a new sequence."""
        count = self.backlog.count.at[slot].set(0)
        return dataclasses.replace(
            self,
            choice=block_choice.forget(self.choice, slot),
            backlog=dataclasses.replace(self.backlog, count=count),
        )

    def timed(self, bucket: int, length: jax.Array, lengths: tuple[int, int]) -> "Adaptive":
        """Selects the cycle times of a batch bucket, for sequences of a mean length.

        Args:
          bucket: Index of the batch bucket.
          length: float32 []; mean length.
          lengths: Lengths at which cycles were timed, ascending.
        """
        seconds = seconds_at(self.seconds[bucket], length, lengths)
        choice = dataclasses.replace(self.choice, seconds=seconds)
        return dataclasses.replace(self, choice=choice)

    def choose(self, *args: Any) -> "Adaptive":
        """Chooses the block size of the next cycle; see `block_choice.choose`."""
        choice = block_choice.choose(self.choice, *args)
        return dataclasses.replace(self, choice=choice)

    def at(self, index: int) -> "Adaptive":
        """Chooses the block size with this index for the next cycle, whatever it costs."""
        index = jnp.full_like(self.choice.index, index)
        return dataclasses.replace(self, choice=dataclasses.replace(self.choice, index=index))

    def learn(self, *args: Any) -> "Adaptive":
        """Updates the statistics with the outcome of a cycle; see `block_choice.learn`."""
        choice = block_choice.learn(self.choice, *args)
        return dataclasses.replace(self, choice=choice)

    def earn(self, active: jax.Array) -> "Adaptive":
        """Goes on after a plain cycle; see `block_choice.earn`."""
        choice = block_choice.earn(self.choice, active)
        return dataclasses.replace(self, choice=choice)

    def put_aside(
        self, tokens: jax.Array, num_committed: jax.Array, features: jax.Array
    ) -> "Adaptive":
        """Stores a plain cycle's rows in the backlog; see `Backlog.append`."""
        return dataclasses.replace(
            self, backlog=self.backlog.append(tokens, num_committed, features)
        )

    def must_clear(self, active: jax.Array) -> jax.Array:
        """Returns whether the backlog must be cleared before the next cycle, bool []."""
        pending = self.backlog.pending(active)
        allowed = jnp.where(self.choice.index == PLAIN, backlog.ROWS - 1, 0)
        return jnp.any(pending > allowed)


def spare_rows(sizes: tuple[int, ...]) -> int:
    """Returns the extra rows that a drafter's state needs past the longest sequence."""
    return backlog.ROWS if len(sizes) > 1 else 0


def abstract(
    sizes: tuple[int, ...],
    batch: int,
    width: int,
    dtype: jnp.dtype,
    sharding: Sharding,
    num_buckets: int = 1,
    division: Division = WHOLE,
    *,
    trees: bool = False,
) -> Adaptive | None:
    """Returns the abstract state, zero-initialized; None if there is only one block size.

    Args:
      sizes: Numbers of rows that a cycle may verify, ascending.
      batch: Batch size B.
      width: Width C·D of the features that the drafter observes.
      dtype: Dtype of the features.
      sharding: Sharding of the arrays.
      num_buckets: Number W of batch buckets.
      division: Cycles that divide their rows.
      trees: Whether drafts form trees.
    """
    if len(sizes) == 1:
        return None
    choice = block_choice.abstract(batch, sizes, sharding, division, trees=trees)
    return Adaptive(
        choice,
        backlog.abstract(batch, width, dtype, sharding),
        sharding.abstract((num_buckets, 2, *choice.seconds.shape), (None,) * 3, jnp.float32),
    )


def with_seconds(state: Adaptive | None, seconds: jax.Array) -> Adaptive | None:
    """Returns the state with this table of cycle times, float32 [W, 2, S]."""
    if state is None:
        return None
    choice = dataclasses.replace(state.choice, seconds=seconds[-1, 0])
    return dataclasses.replace(state, choice=choice, seconds=seconds)


def seconds_at(table: ArrayLike, length: ArrayLike, lengths: tuple[int, int]) -> jax.Array:
    """Returns the cycle times of sequences of a mean length, float32 [S].

    Attention takes time in proportion to the length, so the times are linear in it. Below the
    shorter of the measured lengths they are those of that one.

    Args:
      table: float32 [2, S]; seconds of a cycle of each choice, at two lengths.
      length: float32 []; mean length.
      lengths: Lengths at which cycles were timed, ascending.
    """
    (short, long), (least, most) = jnp.asarray(table), lengths
    weight = jnp.maximum(length - least, 0) / max(most - least, 1)
    # Where the two are equal, they may be infinite.
    return jnp.where(short == long, short, short + weight * (long - short))


def timed_lengths(max_length: int) -> tuple[int, int]:
    """Returns the two lengths at which cycles are timed, given the maximal one."""
    return max(1, max_length // 8), max(1, max_length // 2)


def only(index: int, count: int) -> np.ndarray:
    """Returns a table, float32 [S], that forces one of S = `count` choices.

    All others are infinitely slow in it.
    """
    seconds = np.full(count, np.inf, np.float32)
    seconds[index] = 1.0
    return seconds
