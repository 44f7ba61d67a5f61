"""Division of the rows of a cycle among its sequences, by the chances of their drafts."""

import jax
import jax.numpy as jnp

from dflash.inference.cycle.choices import Choices


def survival(rates: jax.Array, active: jax.Array, room: jax.Array, *, trees: bool) -> jax.Array:
    """Returns the chance that each draft is committed, [B, G], descending in each sequence.

    Args:
      rates: float32 [B, G]; rates of acceptance, in a chain once all drafts before are accepted.
      active: bool [B]; the drafts of other sequences have chance 0.
      room: int32 [B]; tokens until the sequence's limit. One draft fewer counts, of a tree too.
      trees: Whether drafts form trees, the first of which are the likeliest.
    """
    chances = jax.lax.cummin(rates, axis=1) if trees else jnp.cumprod(rates, axis=1)
    within = jnp.arange(1, rates.shape[1] + 1) < room[:, None]
    return jnp.where(active[:, None] & within, chances, 0)


def divide(chances: jax.Array, active: jax.Array, mean_rows: int, num_replicas: int) -> jax.Array:
    """Divides rows among sequences: to the drafts with the largest chances in their replica.

    Args:
      chances: float32 [B, G]; see `survival`.
      active: bool [B]; each of these sequences has a row for its anchor.
      mean_rows: Mean number of rows per slot.
    Returns:
      Rows of each sequence, int32 [B], anchor included; 0 for inactive ones.
    """
    by_replica = chances.reshape(num_replicas, -1)
    order = jnp.argsort(-by_replica, axis=1, stable=True)
    # Of equal chances the first come first, so that every sequence gets a prefix of its drafts.
    rank = jnp.argsort(order, axis=1)
    drafts = _drafts_per_replica(active, mean_rows, num_replicas)
    chosen = ((rank < drafts) & (by_replica > 0)).reshape(chances.shape)
    return active + chosen.sum(axis=1, dtype=jnp.int32)


def expected_tokens(chances: jax.Array, active: jax.Array, choices: Choices) -> jax.Array:
    """Returns the expected number of tokens that a cycle of each division commits, float32 [P]."""
    by_replica = chances.reshape(choices.num_replicas, -1)
    draft = jnp.arange(by_replica.shape[1]) % chances.shape[1]
    draft = jnp.broadcast_to(draft, by_replica.shape)
    negative, draft = jax.lax.sort((-by_replica, draft), num_keys=1)

    def tokens(mean_rows):
        drafts = _drafts_per_replica(active, mean_rows, choices.num_replicas)
        drafted = draft < choices.drafted(mean_rows) - 1
        counted = drafted & (jnp.cumsum(drafted, axis=1) <= drafts)
        return active.sum() - jnp.where(counted, negative, 0).sum()

    return jnp.stack([tokens(mean_rows) for mean_rows in choices.mean_rows])


def _drafts_per_replica(active: jax.Array, mean_rows: int, num_replicas: int) -> int:
    """Returns the number of drafts that each replica verifies, anchors not counted."""
    return active.shape[0] // num_replicas * (mean_rows - 1)
