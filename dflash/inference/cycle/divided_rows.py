"""Division of the rows of a cycle among its sequences, by the chances of their drafts."""

import jax
import jax.numpy as jnp

from dflash.inference.cycle.choices import Division


def divide(survival: jax.Array, active: jax.Array, mean_rows: int, num_replicas: int) -> jax.Array:
    """Divides rows among sequences: to the drafts with the largest chances in their replica.

    Args:
      survival: float32 [B, G]; chance that each draft is committed, descending in each sequence.
      active: bool [B]; each of these sequences has a row for its anchor.
      mean_rows: Mean number of rows per slot.
      num_replicas: Number of replicas.
    Returns:
      Rows of each sequence, int32 [B], anchor included; 0 for inactive ones.
    """
    chances = survival.reshape(num_replicas, -1)
    order = jnp.argsort(-chances, axis=1, stable=True)
    # Of equal chances the first come first, so that every sequence gets a prefix of its drafts.
    rank = jnp.argsort(order, axis=1)
    drafts = _drafts_per_replica(active, mean_rows, num_replicas)
    chosen = ((rank < drafts) & (chances > 0)).reshape(survival.shape)
    return active + chosen.sum(axis=1, dtype=jnp.int32)


def expected_tokens(
    survival: jax.Array, active: jax.Array, sizes: tuple[int, ...], division: Division
) -> jax.Array:
    """Returns the expected number of tokens that a cycle of each division commits, float32 [P]."""
    num_replicas = division.num_replicas
    chances = survival.reshape(num_replicas, -1)
    draft = jnp.arange(chances.shape[1]) % survival.shape[1]
    negative, draft = jax.lax.sort((-chances, jnp.broadcast_to(draft, chances.shape)), num_keys=1)

    def tokens(mean_rows):
        drafts = _drafts_per_replica(active, mean_rows, num_replicas)
        drafted = draft < division.drafted(sizes, mean_rows) - 1
        counted = drafted & (jnp.cumsum(drafted, axis=1) <= drafts)
        return active.sum() - jnp.where(counted, negative, 0).sum()

    return jnp.stack([tokens(mean_rows) for mean_rows in division.mean_rows])


def _drafts_per_replica(active: jax.Array, mean_rows: int, num_replicas: int) -> int:
    """Returns the number of drafts that each replica verifies, anchors not counted."""
    return active.shape[0] // num_replicas * (mean_rows - 1)
