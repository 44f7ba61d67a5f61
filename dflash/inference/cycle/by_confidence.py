"""Statistics of cycles whose rows are divided by the drafter's confidence.

Such cycles commit more tokens than the rates of `block_choice` promise, since confidence tells
drafts of the same position apart. How many times as many, the gain, is measured for each division
and is part of the choice. The drafts that are verified are the likelier ones, and would spoil the
rates. So drafts without a row count too: as accepted in part, by their confidence.
"""

import jax
import jax.numpy as jnp

# The prior is high enough that divisions are tried. Its weight and MEMORY count cycles that divide;
# IDLE_MEMORY counts others, after which divisions are tried again.
PRIOR, WEIGHT = 1.25, 2.0
MEMORY, IDLE_MEMORY = 16.0, 256.0


def new(num_divisions: int) -> jax.Array:
    """Returns the gains before anything was measured, float32 [2, P].

    The rows are the number of cycles of each division, and the sum of their gains, both with
    exponential decay.
    """
    return jnp.zeros((2, num_divisions))


def gain(gains: jax.Array) -> jax.Array:
    """Returns the estimated gain of each division, float32 [P]."""
    cycles, total = gains
    return (total + WEIGHT * PRIOR) / (cycles + WEIGHT)


def learn(gains: jax.Array, division: jax.Array, gain: jax.Array, counts: jax.Array) -> jax.Array:
    """Updates the gains after a cycle that divided rows.

    Args:
      gains: Gains before the cycle.
      division: int32 []; index of the division.
      gain: float32 []; ratio of the committed tokens to those that the rates promised.
      counts: bool []; whether the gain is known.
    """
    used = (jnp.arange(gains.shape[1]) == division) & counts
    fresh = gains * (1 - 1 / MEMORY) + jnp.stack([jnp.ones_like(gain), gain])[:, None]
    return jnp.where(used, fresh, idle(gains))


def idle(gains: jax.Array | None) -> jax.Array | None:
    """Returns the gains after a cycle that divided no rows."""
    return None if gains is None else gains * (1 - 1 / IDLE_MEMORY)


def without_row(
    confidence: jax.Array, counted: jax.Array, *, trees: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns how drafts without a row count in the rates.

    Args:
      confidence: float32 [B, n]; confidence in the first n drafts.
      counted: bool [B, G]; drafts without a row that could have been accepted.
      trees: Whether drafts form trees.
    Returns:
      Chance that each draft would have been accepted, float32 [B, G], and the weight with which it
      counts, float32 [B, G].
    """
    drafted, most = confidence.shape[1], counted.shape[1]
    chance = jnp.pad(confidence, ((0, 0), (0, most - drafted)))
    counted &= jnp.arange(most) < drafted
    if trees:
        return chance, counted.astype(jnp.float32)
    # A draft of a chain counts as far as those before it are likely to be accepted.
    before = jnp.pad(jnp.where(counted, chance, 1.0), ((0, 0), (1, 0)), constant_values=1.0)
    return chance, jnp.where(counted, jnp.cumprod(before, axis=1)[:, :-1], 0.0)
