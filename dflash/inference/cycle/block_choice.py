"""Chooses the block size of the next cycle: the one with the most expected tokens per second.

The time of a cycle of each size is measured once. The tokens that it commits are estimated from
conditional acceptance rates: how often draft g was accepted when all drafts before it had been. The
chance that draft g is accepted is the product of these rates up to g. The drafts of a tree are
ordered by their chance of acceptance, so its first ones are a tree too, and the rate of draft g is
its chance. A draft that was not verified, or that followed a rejected one in a chain, carries no
information, so short blocks give no estimate for longer ones. Occasional trials of a larger size
do, of the one with the most expected tokens per second. A trial takes longer than a cycle of the
best size but commits no fewer tokens, and what it commits beyond them is credited at the expected
speed. It is made once the fraction `TRIALS` of the time spent covers its expected loss, so
successful trials follow each other and a better size soon wins. The bad luck of one trial puts off
the next one at most for as long again: where little can be lost, trials go on.

A cycle may also divide a fixed number of rows among the sequences of a replica, so that each one
verifies the drafts that are worth it: those with the largest chances of acceptance, over all
sequences. Such a cycle drafts blocks of a few times the rows per sequence, or the largest ones,
and packs the rows. Sequences whose drafts are not worth a row decode plainly in it; their
statistics fade, so that they are tried again.

If the drafter states its confidence, rows go by that; see `by_confidence`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash.inference.cycle import by_confidence, divided_rows
from dflash.inference.cycle.choices import WHOLE, Division
from dflash.parallel.sharding import Sharding

_AMPLE = 1e9  # Credit in seconds, more than any trial costs.
_LEAST_SPEED = 1e-9  # Tokens per second of an empty batch, whose speed is 0.
TRIALS = 0.01  # Largest fraction of the time that trials may cost.

# The prior of a sequence's rate is the pooled rate of all sequences; the prior of a pooled rate is
# that of the drafts before it; the first one's is PRIOR, high enough that drafting is tried at all.
# Weights and MEMORY count verified drafts. POOL_MEMORY counts cycles of a sequence: drafts that are
# rarely tried must be forgotten as fast as others, or their rates are those of an earlier task.
PRIOR, PRIOR_WEIGHT = 0.8, 8.0
POOL_WEIGHT = 8.0
MEMORY, POOL_MEMORY = 64.0, 64.0
IDLE_MEMORY = 16.0  # Counts cycles in which a sequence verified no draft, but others did.
CARRIED = 16.0  # Largest number of verified drafts that the outcomes of earlier runs count as.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockChoice:
    """Acceptance statistics, and the size of the next cycle; S sizes, G drafts in the largest.

    Attributes:
      tried: float32 [B, G]; how often draft g was verified, in a chain after all before it were
        accepted, with exponential decay.
      accepted: float32 [B, G]; how often it was then accepted.
      pool_tried: float32 [G]; sum of `tried` over all sequences, past ones included.
      pool_accepted: float32 [G]; sum of `accepted` over all sequences, past ones included.
      seconds: float32 [S]; seconds of a cycle of each size, and then of each division.
      credit: float32 []; seconds that trials may currently cost.
      best: int32 []; index of the size with the highest expected speed.
      promise: float32 []; expected tokens per second of that size, summed over all sequences.
      trial: int32 []; index of the larger size that is tried next; the best's if there is none.
      loss: float32 []; seconds that its trial is expected to cost.
      index: int32 []; index of the next cycle's size: the best, or that of a trial.
      gains: float32 [2, P]; gain by confidence of each division; see `by_confidence`. None unless
        rows are divided by confidence.
      trees: Whether drafts form trees.
    """

    tried: jax.Array
    accepted: jax.Array
    pool_tried: jax.Array
    pool_accepted: jax.Array
    seconds: jax.Array
    credit: jax.Array
    best: jax.Array
    promise: jax.Array
    trial: jax.Array
    loss: jax.Array
    index: jax.Array
    gains: jax.Array | None = None
    trees: bool = dataclasses.field(default=False, metadata={"static": True})


def abstract(
    batch: int,
    sizes: tuple[int, ...],
    sharding: Sharding,
    division: Division = WHOLE,
    *,
    trees: bool = False,
) -> BlockChoice:
    """Returns an abstract choice; zeros mean no statistics, and `seconds` must be set.

    Args:
      batch: Batch size B.
      sizes: S block sizes, ascending.
      sharding: Sharding of the arrays.
      division: Cycles that divide their rows.
      trees: Whether drafts form trees.
    """
    form = jax.eval_shape(
        lambda: new(batch, sizes, jnp.zeros(len(sizes) + len(division.mean_rows)), division)
    )
    placed = jax.tree.map(lambda x: sharding.abstract(x.shape, (None,) * x.ndim, x.dtype), form)
    of_sequences = sharding.abstract(form.tried.shape, ("batch", None), form.tried.dtype)
    return dataclasses.replace(placed, tried=of_sequences, accepted=of_sequences, trees=trees)


def new(
    batch: int, sizes: tuple[int, ...], seconds: jax.Array, division: Division = WHOLE
) -> BlockChoice:
    """Returns a choice of size 1 without statistics.

    Args:
      batch: Batch size B.
      sizes: Block sizes, ascending.
      seconds: float32 [S]; seconds of a cycle of each size and division.
      division: Cycles that divide their rows.
    """
    num_drafts, num_divisions = sizes[-1] - 1, len(division.mean_rows)
    per_sequence, pool = jnp.zeros((batch, num_drafts)), jnp.zeros(num_drafts)
    by_gain = division.by_confidence and num_divisions
    number, index = jnp.float32(0), jnp.int32(0)
    return BlockChoice(
        tried=per_sequence,
        accepted=per_sequence,
        pool_tried=pool,
        pool_accepted=pool,
        seconds=seconds,
        credit=number,
        best=index,
        promise=jnp.float32(1),
        trial=index,
        loss=number,
        index=index,
        gains=by_confidence.new(num_divisions) if by_gain else None,
    )


def carried(choice: BlockChoice) -> BlockChoice:
    """Returns the choice for another run, whose prompts may be of another kind.

    A trial is due, and the first trials must outweigh what all earlier runs have told.
    """
    scale = CARRIED / jnp.maximum(choice.pool_tried.max(), CARRIED)
    return dataclasses.replace(
        choice,
        pool_tried=choice.pool_tried * scale,
        pool_accepted=choice.pool_accepted * scale,
        credit=choice.credit + _AMPLE,
    )


def forget(choice: BlockChoice, slot: jax.Array) -> BlockChoice:
    """Clears the statistics of slot `slot` for a new sequence; the pool's stay."""
    return dataclasses.replace(
        choice,
        tried=choice.tried.at[slot].set(0),
        accepted=choice.accepted.at[slot].set(0),
    )


def rates(choice: BlockChoice) -> jax.Array:
    """Returns each draft's acceptance rate, [B, G]; in a chain once all before it are accepted."""
    tried, accepted = choice.pool_tried, choice.pool_accepted
    tried_before, accepted_before = jnp.cumsum(tried) - tried, jnp.cumsum(accepted) - accepted
    prior = (accepted_before + PRIOR_WEIGHT * PRIOR) / (tried_before + PRIOR_WEIGHT)
    pool = (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
    return (choice.accepted + POOL_WEIGHT * pool) / (choice.tried + POOL_WEIGHT)


def survival(
    rates: jax.Array, active: jax.Array, left: jax.Array, *, trees: bool = False
) -> jax.Array:
    """Returns the chance that each draft is committed, [B, G], descending in each sequence.

    Args:
      rates: float32 [B, G]; see `rates`.
      active: bool [B]; the drafts of other sequences have chance 0.
      left: int32 [B]; tokens until the sequence's limit. One draft fewer counts, of a tree too.
      trees: Whether drafts form trees.
    """
    chances = jax.lax.cummin(rates, axis=1) if trees else jnp.cumprod(rates, axis=1)
    within = jnp.arange(1, rates.shape[1] + 1) < left[:, None]
    return jnp.where(active[:, None] & within, chances, 0)


def choose(
    choice: BlockChoice,
    active: jax.Array,
    left: jax.Array,
    sizes: tuple[int, ...],
    division: Division = WHOLE,
) -> BlockChoice:
    """Chooses the size of the next cycle, one for the whole batch, or a division of its rows.

    Args:
      choice: Acceptance statistics and cycle times.
      active: bool [B]; sequences to take into account.
      left: int32 [B]; tokens until each one's limit, 1 for one that decodes plainly.
      sizes: S block sizes.
      division: Cycles that divide their rows.
    """
    chances = survival(rates(choice), active, left, trees=choice.trees)
    drafts = jnp.cumsum(jnp.pad(chances.sum(axis=0), (1, 0)))
    tokens = active.sum() + drafts[jnp.array(sizes) - 1]
    if division.mean_rows:
        divided = divided_rows.expected_tokens(chances, active, sizes, division)
        if choice.gains is not None:
            divided *= by_confidence.gain(choice.gains)
        tokens = jnp.concatenate([tokens, divided])
    speeds = tokens / choice.seconds
    best = jnp.argmax(speeds).astype(jnp.int32)
    larger = _larger(sizes, division)[best]
    trial = jnp.where(larger.any(), jnp.argmax(jnp.where(larger, speeds, -1)), best)
    gained = (tokens[trial] - tokens[best]) / jnp.maximum(speeds[best], _LEAST_SPEED)
    loss = choice.seconds[trial] - choice.seconds[best] - gained
    chosen = dataclasses.replace(
        choice,
        best=best,
        promise=speeds[best],
        trial=trial.astype(jnp.int32),
        loss=jnp.where(trial == best, 0, jnp.maximum(loss, 0)),
    )
    return _with_credit(chosen, choice.credit)


def earn(choice: BlockChoice, active: jax.Array) -> BlockChoice:
    """Goes on after a cycle of size 1, which tells nothing about drafts: a trial may be due.

    The best size stays, though a sequence may have ended. That is much less work than `learn` and
    `choose`, and plain cycles are the shortest.

    Args:
      choice: Statistics before the cycle.
      active: bool [B]; sequences in the cycle.
    """
    earned = _trials(active.sum()) * choice.seconds[choice.best]
    choice = dataclasses.replace(choice, gains=by_confidence.idle(choice.gains))
    return _with_credit(choice, choice.credit + earned)


def _with_credit(choice: BlockChoice, credit: jax.Array) -> BlockChoice:
    """Returns the choice with this credit, and with the next cycle's size, the best or a trial's.

    Credit is capped at one trial, so that saved credit does not cause a burst of trials. Debt is,
    too: what a trial cost beyond its expected loss is bad luck, of which the rates tell.
    """
    index = jnp.where(credit >= choice.loss, choice.trial, choice.best)
    credit = jnp.clip(credit, -choice.loss, choice.loss)
    return dataclasses.replace(choice, credit=credit, index=index)


def _trials(num_active: jax.Array) -> jax.Array:
    """Returns the largest fraction of the time that trials may cost.

    A trial tells as much about the pooled rates as there are sequences in the batch.
    """
    return TRIALS / jnp.sqrt(jnp.maximum(num_active, 1).astype(jnp.float32))


def learn(
    choice: BlockChoice,
    num_committed: jax.Array,
    left: jax.Array,
    sizes: tuple[int, ...],
    division: Division = WHOLE,
    rows: jax.Array | None = None,
    on_path: jax.Array | None = None,
    confidence: jax.Array | None = None,
) -> BlockChoice:
    """Updates the statistics with the outcome of the cycle that `choice` chose.

    Args:
      choice: Statistics before the cycle.
      num_committed: int32 [B]; tokens committed by the cycle, 0 for an empty slot.
      left: int32 [B]; tokens until each one's limit, before the cycle.
      sizes: S block sizes.
      division: Cycles that divide their rows.
      rows: int32 [B]; rows that each sequence verified. None: those of the chosen size.
      on_path: bool [B, n]; which of the first drafts were committed. None for chains, whose number
        of committed tokens tells.
      confidence: float32 [B, n]; the drafter's confidence in the first drafts, if rows were divided
        by it.
    """
    means = jnp.array((*sizes, *division.mean_rows))
    idle, gains = jnp.zeros_like(num_committed, bool), by_confidence.idle(choice.gains)
    if confidence is not None:
        gains = _learn_gain(choice, num_committed, len(sizes))
    elif rows is not None:
        idle = (rows == 1) & (num_committed > 0)
    drafts = ((means[choice.index] if rows is None else rows) - 1).reshape(-1, 1)
    tried, accepted = _outcomes(choice, num_committed, left, drafts, on_path, confidence)
    fade = 1 - tried / MEMORY - idle[:, None] / IDLE_MEMORY
    pool_fade = (1 - 1 / POOL_MEMORY) ** tried[:, :1].sum()
    spent, best = choice.seconds[choice.index], choice.seconds[choice.best]
    gained = jnp.maximum(num_committed - means[choice.best], 0).sum() / choice.promise
    gained = jnp.where(choice.index == choice.best, 0, gained)
    earned = _trials((num_committed > 0).sum()) * best
    credit = choice.credit + earned - (spent - best) + gained
    return dataclasses.replace(
        choice,
        tried=choice.tried * fade + tried,
        accepted=choice.accepted * fade + accepted,
        pool_tried=choice.pool_tried * pool_fade + tried.sum(axis=0),
        pool_accepted=choice.pool_accepted * pool_fade + accepted.sum(axis=0),
        credit=credit,
        gains=gains,
    )


def _outcomes(choice, num_committed, left, drafts, on_path, confidence):
    """Returns how often each draft was tried and accepted in a cycle, float32 [B, G] each.

    The arguments are those of `learn`, and the drafts of each sequence that had a row, [B or 1, 1].
    """
    draft = jnp.arange(choice.tried.shape[1])
    # The first draft that was not committed is the last informative one: it was rejected, or the
    # sequence ended before it. A stop token counts as a rejection, since blocks reach past it; the
    # length limit does not, since it is known in advance.
    num_useful = num_committed[:, None] - 1
    goes_on = (num_committed < left)[:, None] & (num_useful >= 0)
    if on_path is None:
        tried = (draft < drafts) & (draft < num_useful + goes_on)
        on_path = draft < num_useful
    else:
        # Rejected drafts of a tree may be as deep as the limit, so a limit tells nothing at all.
        tried = (draft < drafts) & goes_on
        on_path = jnp.pad(on_path, ((0, 0), (0, draft.size - on_path.shape[1])))
    tried = tried.astype(jnp.float32)
    accepted = tried * on_path
    if confidence is None:
        return tried, accepted
    counted = goes_on & (draft >= drafts) & (choice.trees | (num_useful >= drafts))
    chance, weight = by_confidence.without_row(confidence, counted, trees=choice.trees)
    return tried + weight, accepted + weight * chance


def _learn_gain(choice: BlockChoice, num_committed: jax.Array, num_sizes: int) -> jax.Array:
    """Returns the gains with that of a cycle that divided rows by confidence."""
    division, promised = choice.index - num_sizes, choice.promise * choice.seconds[choice.best]
    gain = num_committed.sum() * by_confidence.gain(choice.gains)[division] / promised
    # A trial has no promise of its own.
    return by_confidence.learn(choice.gains, division, gain, choice.index == choice.best)


def _larger(sizes: tuple[int, ...], division: Division) -> jax.Array:
    """Returns which choices a trial may take instead of each one, bool [S, S].

    These are the larger ones of its kind, and after the largest division the largest size.
    """
    count, last = len(sizes), len(sizes) - 1
    index = np.arange(count + len(division.mean_rows))
    is_size = index < count
    larger = (index > index[:, None]) & (is_size == is_size[:, None])
    if division.mean_rows:
        larger[-1, last] = True
    return jnp.array(larger)
