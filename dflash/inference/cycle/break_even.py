"""Tells for how many sequences at once drafting is expected to pay, by the times of cycles.

A drafter that cannot pay for a full batch need not observe its prompts; see `observation`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dflash.inference.cycle import block_choice
from dflash.inference.cycle.adaptive import seconds_at, timed_lengths
from dflash.inference.cycle.block_choice import Outcomes
from dflash.inference.cycle.choices import WHOLE, Division
from dflash.inference.cycle.rules import Rules
from dflash.inference.pages import Layout

HOPE = 0.9  # A rate of acceptance that few drafters reach.


def hopeful(sizes: tuple[int, ...]) -> Outcomes:
    """Returns outcomes of many drafts, of which the fraction `HOPE` was accepted."""
    tried = np.full(sizes[-1] - 1, 2.0**16, np.float32)  # So many that priors hardly count.
    return tried, HOPE * tried


def most_drafted(
    tables: ArrayLike,
    length: float,
    outcomes: Outcomes,
    layout: Layout,
    rules: Rules,
    *,
    trees: bool = False,
) -> int:
    """Returns for how many sequences at once drafting is expected to pay at most, or 0.

    Args:
      tables: float32 [W, 2, S]; seconds of cycles, see `Adaptive`.
      length: Mean length of the sequences in tokens.
      outcomes: Outcomes of drafts of all sequences.
      layout: Batch buckets, and the number of replicas over which sequences are spread.
      rules: Block sizes, and divisions of rows.
      trees: Whether drafts form trees.
    """
    most, lengths = 0, timed_lengths(layout.max_length)
    for slots, table in zip(layout.bucket_sizes, tables, strict=True):
        seconds, batch = seconds_at(table, length, lengths), slots * layout.num_replicas
        paying = pays(seconds, outcomes, batch, rules.block_sizes, rules.division, trees=trees)
        most = max([most, *1 + np.flatnonzero(paying)])
    return int(most)


@functools.partial(jax.jit, static_argnames=("batch", "sizes", "division", "trees"))
def pays(
    seconds: jax.Array,
    outcomes: Outcomes,
    batch: int,
    sizes: tuple[int, ...],
    division: Division = WHOLE,
    *,
    trees: bool = False,
) -> jax.Array:
    """Returns whether drafting is expected to pay for 1 … B sequences, bool [B].

    They are spread over the replicas, far from their limits, and nothing is known of each.

    Args:
      seconds: float32 [S]; seconds of a cycle of each size and division.
      outcomes: Outcomes of drafts of all sequences.
      batch: Batch size B.
      sizes: S block sizes.
      division: Cycles that divide their rows.
      trees: Whether drafts form trees.
    """
    tried, accepted = outcomes
    choice = dataclasses.replace(
        block_choice.new(batch, sizes, seconds, division),
        pool_tried=tried,
        pool_accepted=accepted,
        trees=trees,
    )
    order = jnp.arange(batch).reshape(-1, division.num_replicas).T.reshape(-1)
    far = jnp.full(batch, sizes[-1] + 1)

    def drafts(count):
        return block_choice.choose(choice, order < count, far, sizes, division).best > 0

    return jax.vmap(drafts)(1 + jnp.arange(batch))
