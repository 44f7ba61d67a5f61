"""Trees from the marginals of a single pass: one distribution for each draft position.

Source: DDTree, arXiv 2604.12989.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.drafters.base import Proposal, Sampler


class Nodes(NamedTuple):
    """G nodes of a tree, parents before children and elder siblings before younger ones.

    Attributes:
      depth: int32 [B, G]; draft position of the token, 0 for the one after the anchor.
      rank: int32 [B, G]; which candidate of that draft position, 0 for the best.
      parents: int32 [B, G]; row of the parent, as in `Proposal`.
    """

    depth: jax.Array
    rank: jax.Array
    parents: jax.Array


def propose(logits: jax.Array, positions: jax.Array, sampler: Sampler, budget: int) -> Proposal:
    """The tree of the `budget` likeliest prefixes of a block.

    Args:
      logits: float32 [B, D, V]; of D draft positions, independent of one another.
      positions: int32 [B, D]; absolute positions of the tokens.
      sampler: ranks the candidates of each draft position.
      budget: G, at most what `check_budget` allows.
    """
    candidates = sampler.candidates(logits, positions, min(budget, logits.shape[-1]))
    nodes = best_first(candidates.scores, budget)
    batch = jnp.arange(logits.shape[0])[:, None]
    tokens = candidates.tokens[batch, nodes.depth, nodes.rank]
    drawn_from = None if candidates.probs is None else nodes.depth
    return Proposal(tokens, nodes.parents, candidates.probs, drawn_from)


def best_first(scores: jax.Array, budget: int) -> Nodes:
    """The `budget` prefixes with the largest sums of scores, exactly; ties are broken arbitrarily.

    Sums only fall along a prefix, so the best prefixes of each length are among the extensions of
    the best ones that are a token shorter. Of these sums, a best parent's with a best candidate's,
    the one of parent i and candidate j is at most as large as (i + 1)(j + 1) - 1 others, so few
    pairs need to be compared.

    Args:
      scores: float32 [B, D, k], falling along k and at most 0, where k is the smaller one of the
        budget and the size of the vocabulary.
      budget: G.
    """
    batch, depths, count = scores.shape
    each = jnp.arange(batch)[:, None]
    sums = jnp.zeros((batch, 1), scores.dtype)
    levels, before, begin = [], 0, 0  # where the nodes of the parents, and of this level, begin
    for depth in range(depths):
        parent, rank = _pairs(sums.shape[1], count, budget)
        pairs = sums[:, parent] + scores[:, depth, rank]
        sums, best = jax.lax.top_k(pairs, min(budget, len(parent)))
        parent, rank = jnp.asarray(parent)[best], jnp.asarray(rank)[best]
        # The anchor is not a node.
        parent = parent + before if depth else jnp.full_like(parent, -1)
        levels.append((sums, jnp.full_like(rank, depth), rank, parent))
        before, begin = begin, begin + sums.shape[1]
    everything, depth, rank, parent = (
        jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True)
    )
    # Of equal sums the first counts: a parent comes before its children, an elder sibling before a
    # younger one. So whatever is chosen, its parent and its elder siblings are.
    _, chosen = jax.lax.top_k(everything, budget)
    place = jnp.zeros(everything.shape, jnp.int32).at[each, chosen].set(jnp.arange(budget))
    parent = parent[each, chosen]
    parents = jnp.where(parent < 0, 0, place[each, parent] + 1)
    return Nodes(depth[each, chosen], rank[each, chosen], parents)


def check_budget(budget: int, depths: int, vocab_size: int) -> None:
    """Raises ConfigError if a tree over this many draft positions cannot have `budget` nodes."""
    capacity = sum(vocab_size**depth for depth in range(1, depths + 1))
    if budget > capacity:
        raise errors.ConfigError(
            f"drafter.tree.budget: {budget} is larger than the block's capacity, {capacity} drafts "
            f"at {depths} draft position{'s' if depths > 1 else ''} of {vocab_size} tokens; lower "
            "it, or raise drafter.block_size"
        )


def _pairs(parents: int, count: int, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of parent and rank, int32 each, whose sum may be among the `budget` largest."""
    parent, rank = np.meshgrid(
        np.arange(parents, dtype=np.int32), np.arange(count, dtype=np.int32), indexing="ij"
    )
    likely = (parent + 1) * (rank + 1) <= budget
    return parent[likely], rank[likely]
