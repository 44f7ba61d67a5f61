"""Chooses the rows of the next cycle: those with the most expected tokens per second.

The time of a cycle of each choice is measured once. The tokens that it commits are estimated from
conditional acceptance rates: how often draft g was accepted when all drafts before it had been. The
chance that draft g is accepted is the product of these rates up to g. The drafts of a tree are
ordered by their chance of acceptance, so its first ones are a tree too, and the rate of draft g is
its chance. A draft that was not verified, or that followed a rejected one in a chain, carries no
information, so short blocks give no estimate for longer ones. Occasional trials of a larger size
do, of the one with the most expected tokens per second; see `bandit`. A trial takes longer than a
cycle of the best size but commits no fewer tokens, and what it commits beyond them is credited at
the expected speed, so successful trials follow each other and a better size soon wins.

A cycle may also divide a fixed number of rows among the sequences of a replica by the drafter's
confidence. It then commits more tokens than the rates promise, since confidence tells drafts of the
same position apart. How many times as many, the gain, is measured for each division.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dflash.drafters.base import Drafter, Heads
from dflash.drafters.parts.bandit import TRIALS, Counts, Trial
from dflash.inference.cycle import backlog, division
from dflash.inference.cycle.backlog import Backlog
from dflash.inference.cycle.block import Block
from dflash.inference.cycle.choices import Choices
from dflash.inference.cycle.verify import VerifyResult
from dflash.parallel.sharding import Sharding

PLAIN = 0  # Index of block size 1, at which nothing is drafted.
_AMPLE = 1e9  # Credit in seconds, more than any trial costs: the first one of a run is due at once.
_LEAST_SPEED = 1e-9  # Tokens per second of an empty batch, whose speed is 0.

# The prior of a sequence's rate is the pooled rate of all sequences; the prior of a pooled rate is
# that of the drafts before it; the first one's is PRIOR, high enough that drafting is tried at all.
# Weights and MEMORY count verified drafts. POOL_MEMORY counts cycles of a sequence: drafts that are
# rarely tried must be forgotten as fast as others, or their rates are those of an earlier task.
PRIOR, PRIOR_WEIGHT, POOL_WEIGHT = 0.8, 8.0, 8.0
MEMORY, POOL_MEMORY = 64.0, 64.0
# An earlier run's rates count as at most so many trials, as its prompts may be of another kind.
LEARNT = 16.0
# The prior of a gain is high enough that divisions are tried. Its weight and memory count cycles
# that divide; IDLE_MEMORY counts others, after which divisions are tried again.
GAIN, GAIN_WEIGHT, GAIN_MEMORY, IDLE_MEMORY = 1.25, 2.0, 16.0, 256.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedRows:
    """The only choice of a fixed block size: nothing is learnt, and every cycle is observed."""

    @property
    def learnt(self) -> Counts | None:
        """Counts of all sequences, for another run."""
        return None

    def with_learnt(self, learnt: Counts | None) -> "FixedRows":
        """Returns the choice of a new run with what another one learnt."""
        return self

    def starting(self, seconds: jax.Array) -> "FixedRows":
        """Returns the choice of a new run, given the times of cycles."""
        return self

    def insert(self, slot: jax.Array) -> "FixedRows":
        """Resets slot `slot` for a new sequence."""
        return self

    def timed(self, bucket: int, length: jax.Array, lengths: tuple[int, int]) -> "FixedRows":
        """Selects the cycle times of a batch bucket, for sequences of a mean length.

        Args:
          bucket: Index of the batch bucket.
          length: float32 []; mean length.
          lengths: Lengths at which cycles were timed, ascending.
        """
        return self

    def choose(self, active: jax.Array, room: jax.Array) -> "FixedRows":
        """Chooses the rows of the next cycle, one choice for the whole batch.

        Args:
          active: bool [B]; sequences to take into account.
          room: int32 [B]; tokens until each one's limit, 1 for one that decodes plainly.
        """
        return self

    def largest(self) -> "FixedRows":
        """Chooses the largest block for the next cycle, whatever it costs."""
        return self

    def learn(
        self, block: Block, result: VerifyResult, num_committed: jax.Array, room: jax.Array
    ) -> "FixedRows":
        """Learns from the outcome of the cycle that was chosen.

        Args:
          num_committed: int32 [B]; tokens committed by the cycle, 0 for an empty slot.
          room: int32 [B]; tokens until each one's limit, before the cycle.
        """
        return self

    def observe(
        self, drafter: Drafter, state: Any, position: jax.Array, *rows: Any
    ) -> tuple[Any, "FixedRows"]:
        """Lets the drafter observe committed rows; see `Drafter.observe`."""
        with jax.named_scope("drafter"):
            return drafter.observe(state, position, *rows), self

    def catch_up(
        self, drafter: Drafter, state: Any, *sequences: jax.Array, heads: Heads
    ) -> tuple[Any, "FixedRows"]:
        """Lets the drafter observe rows that `observe` has put aside."""
        return state, self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChosenRows(FixedRows):
    """Acceptance statistics, and the choice for the next cycle; S choices, G drafts at most.

    Attributes:
      by_sequence: Counts of each sequence's drafts, [B, G]; in a chain, draft g counts as tried
        after all before it were accepted.
      pool: Counts of all sequences, past ones included, [G].
      gains: Counts of the cycles of each division, and the sum of their gains, [P].
      table: float32 [W, 2, S]; seconds of a cycle for each batch bucket, each of two lengths of
        all sequences (see `timing.timed_lengths`), and each choice.
      seconds: float32 [S]; seconds of a cycle of each choice, at present.
      trial: The best choice and the one to try; its loss and credit are in seconds.
      promise: float32 []; expected tokens per second of the best choice, of all sequences together.
      backlog: Rows that the drafter has not observed yet.
    """

    by_sequence: Counts
    pool: Counts
    gains: Counts
    table: jax.Array
    seconds: jax.Array
    trial: Trial
    promise: jax.Array
    backlog: Backlog
    choices: Choices = dataclasses.field(metadata={"static": True})

    @property
    def index(self) -> jax.Array:
        """The choice for the next cycle, int32 []."""
        return self.trial.index

    @property
    def learnt(self):
        return self.pool

    def with_learnt(self, learnt):
        return dataclasses.replace(self, pool=learnt.capped(LEARNT))

    def starting(self, seconds):
        trial = dataclasses.replace(self.trial, credit=jnp.full_like(self.trial.credit, _AMPLE))
        return dataclasses.replace(self, trial=trial, table=seconds, seconds=seconds[-1, 0])

    def insert(self, slot):
        count = self.backlog.count.at[slot].set(0)
        rows_aside = dataclasses.replace(self.backlog, count=count)
        return dataclasses.replace(
            self, by_sequence=self.by_sequence.forget(slot), backlog=rows_aside
        )

    def timed(self, bucket, length, lengths):
        seconds = seconds_at(self.table[bucket], length, lengths)
        return dataclasses.replace(self, seconds=seconds)

    def choose(self, active, room):
        tokens = self._expected_tokens(active, room)
        speeds = tokens / self.seconds
        best, larger = jnp.argmax(speeds), jnp.array(self.choices.larger())
        larger = larger[best]
        other = jnp.where(larger.any(), jnp.argmax(jnp.where(larger, speeds, -1)), best)
        gained = (tokens[other] - tokens[best]) / jnp.maximum(speeds[best], _LEAST_SPEED)
        loss = self.seconds[other] - self.seconds[best] - gained
        trial = self.trial.between(best, other, loss)
        return dataclasses.replace(self, trial=trial, promise=speeds[best])

    def _expected_tokens(self, active, room) -> jax.Array:
        """Returns the tokens that a cycle of each choice is expected to commit, float32 [S]."""
        choices = self.choices
        chances = division.survival(
            rates(self.by_sequence, self.pool), active, room, trees=choices.trees
        )
        drafts = jnp.cumsum(jnp.pad(chances.sum(axis=0), (1, 0)))
        tokens = active.sum() + drafts[np.array(choices.block_sizes) - 1]
        if not choices.mean_rows:
            return tokens
        gains = self.gains.rates(GAIN, GAIN_WEIGHT)
        divided = division.expected_tokens(chances, active, choices) * gains
        return jnp.concatenate([tokens, divided])

    def largest(self):
        last = jnp.full_like(self.trial.best, len(self.choices.block_sizes) - 1)
        trial = dataclasses.replace(self.trial, best=last, other=last)
        return dataclasses.replace(self, trial=trial)

    def learn(self, block, result, num_committed, room):
        best, num_active = self.trial.best, (num_committed > 0).sum()
        # A trial tells as much about the pooled rates as there are sequences in the batch.
        fraction = TRIALS / jnp.sqrt(jnp.maximum(num_active, 1).astype(jnp.float32))
        earned = fraction * self.seconds[best]
        if not block.num_drafts:
            # A plain cycle tells nothing about drafts, and the best choice stays, though a sequence
            # may have ended. That is much less work, and plain cycles are the shortest.
            gains = jax.tree.map(lambda x: x * (1 - 1 / IDLE_MEMORY), self.gains)
            return dataclasses.replace(self, gains=gains, trial=self.trial.earning(earned))
        news = self._outcomes(block, result, num_committed, room)
        by_sequence, pool = remember(self.by_sequence, self.pool, news)
        more = jnp.maximum(num_committed - jnp.array(self.choices.rows)[best], 0).sum()
        gained = jnp.where(self.index == best, 0, more / self.promise)
        spent = self.seconds[self.index] - self.seconds[best]
        return dataclasses.replace(
            self,
            by_sequence=by_sequence,
            pool=pool,
            gains=self._learn_gain(num_committed),
            trial=self.trial.earning(earned - spent + gained),
        )

    def _outcomes(self, block, result, num_committed, room) -> Counts:
        """Returns how often each draft was tried and accepted in a cycle, [B, G]."""
        draft, trees = jnp.arange(self.by_sequence.tried.shape[1]), self.choices.trees
        # The first draft that was not committed is the last informative one: it was rejected, or
        # the sequence ended before it. A stop token counts as a rejection, since blocks reach past
        # it; the length limit does not, since it is known in advance.
        drafts, num_useful = block.counts[:, None] - 1, num_committed[:, None] - 1
        goes_on = (num_committed < room)[:, None] & (num_useful >= 0)
        on_path = result.on_path(jnp.maximum(num_committed - 1, 0), block.num_drafts)
        on_path = jnp.pad(on_path, ((0, 0), (0, draft.size - block.num_drafts)))
        # Rejected drafts of a tree may be as deep as the limit, so a limit tells nothing at all.
        tried = (draft < drafts) & (goes_on if trees else draft < num_useful + goes_on)
        tried = tried.astype(jnp.float32)
        news = Counts(tried, tried * on_path)
        if block.packing is None:
            return news
        missed = goes_on & (draft >= drafts) & (trees | (num_useful >= drafts))
        return news.after(_without_row(block.proposal.confidence, missed, trees=trees), 1.0)

    def _learn_gain(self, num_committed) -> Counts:
        """Returns the gains after a cycle, with its own if it divided rows and was no trial."""
        # A trial has no promise of its own.
        used = jnp.arange(len(self.choices.mean_rows)) + len(self.choices.block_sizes) == self.index
        used &= self.index == self.trial.best
        ratio = num_committed.sum() / (self.promise * self.seconds[self.trial.best])
        gain = ratio * self.gains.rates(GAIN, GAIN_WEIGHT)
        news = Counts(used.astype(jnp.float32), jnp.where(used, gain, 0.0))
        return self.gains.after(news, jnp.where(used, 1 - 1 / GAIN_MEMORY, 1 - 1 / IDLE_MEMORY))

    def step(self, active: jax.Array) -> jax.Array:
        """Returns the index of the chosen cycle, or S if the drafter must catch up first."""
        allowed = jnp.where(self.index == PLAIN, backlog.ROWS - 1, 0)
        behind = jnp.any(self.backlog.pending(active) > allowed)
        return jnp.where(behind, len(self.choices), self.index)

    def observe(self, drafter, state, position, *rows):
        tokens, num_committed, features, _ = rows
        if features.shape[1] > 1:  # Only the rows of plain cycles are put aside.
            return super().observe(drafter, state, position, *rows)
        rows_aside = self.backlog.append(tokens, num_committed, features)
        return state, dataclasses.replace(self, backlog=rows_aside)

    def catch_up(self, drafter, state, *sequences, heads):
        with jax.named_scope("drafter"):
            state, empty = self.backlog.clear(drafter, state, *sequences, heads)
        return state, dataclasses.replace(self, backlog=empty)


def abstract(
    choices: Choices,
    batch: int,
    width: int,
    dtype: jnp.dtype,
    sharding: Sharding,
    num_buckets: int = 1,
) -> FixedRows:
    """Returns the abstract state; zeros mean no statistics, and `starting` must be called.

    Args:
      batch: Batch size B.
      width: Width C·D of the features that the drafter observes.
      dtype: Dtype of the features.
      num_buckets: Number W of batch buckets.
    """
    if len(choices) == 1:
        return FixedRows()

    def numbers(*shape, names=(), dtype=jnp.float32):
        return sharding.abstract(shape, names or (None,) * len(shape), dtype)

    def counts(*shape, **how):
        return Counts(numbers(*shape, **how), numbers(*shape, **how))

    drafts, index = choices.block_sizes[-1] - 1, numbers(dtype=jnp.int32)
    return ChosenRows(
        by_sequence=counts(batch, drafts, names=("batch", None)),
        pool=counts(drafts),
        gains=counts(len(choices.mean_rows)),
        table=numbers(num_buckets, 2, len(choices)),
        seconds=numbers(len(choices)),
        trial=Trial(index, index, numbers(), numbers()),
        promise=numbers(),
        backlog=backlog.abstract(batch, width, dtype, sharding),
        choices=choices,
    )


def rates(by_sequence: Counts, pool: Counts) -> jax.Array:
    """Returns each draft's acceptance rate, [B, G]; in a chain once all before it are accepted."""
    tried, accepted = pool.tried, pool.accepted
    before = Counts(jnp.cumsum(tried) - tried, jnp.cumsum(accepted) - accepted)
    pooled = pool.rates(before.rates(PRIOR, PRIOR_WEIGHT), PRIOR_WEIGHT)
    return by_sequence.rates(pooled, POOL_WEIGHT)


def remember(by_sequence: Counts, pool: Counts, news: Counts) -> tuple[Counts, Counts]:
    """Returns the counts of each sequence and of all after a cycle with these outcomes, [B, G]."""
    pool_fade = (1 - 1 / POOL_MEMORY) ** news.tried[:, :1].sum()
    return by_sequence.after(news, 1 - news.tried / MEMORY), pool.after(news.sum(), pool_fade)


def _without_row(confidence: jax.Array, missed: jax.Array, *, trees: bool) -> Counts:
    """Returns how drafts without a row count: as accepted in part, by the drafter's confidence.

    The drafts that are verified are the likelier ones, and alone would spoil the rates.

    Args:
      confidence: float32 [B, n]; confidence in the first n drafts.
      missed: bool [B, G]; drafts without a row that could have been accepted.
      trees: Whether drafts form trees.
    """
    drafted, most = confidence.shape[1], missed.shape[1]
    chance = jnp.pad(confidence, ((0, 0), (0, most - drafted)))
    missed &= jnp.arange(most) < drafted
    weight = missed.astype(jnp.float32)
    if not trees:
        # A draft of a chain counts as far as those before it are likely to be accepted.
        before = jnp.pad(jnp.where(missed, chance, 1.0), ((0, 0), (1, 0)), constant_values=1.0)
        weight = jnp.where(missed, jnp.cumprod(before, axis=1)[:, :-1], 0.0)
    return Counts(weight, weight * chance)


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
    # Equal times may both be infinite, and their difference is then no number.
    return jnp.where(short == long, short, short + weight * (long - short))
