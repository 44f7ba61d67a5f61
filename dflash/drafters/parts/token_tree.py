"""Draft trees from the marginal distributions of a single pass, one per draft position.

Source: DDTree, arXiv 2604.12989.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.drafters.base import Proposal
from dflash.drafters.parts.calibration import Calibration, by_depth, log_chances
from dflash.drafters.parts.sampler import Sampler


class Nodes(NamedTuple):
    """G nodes of a tree, best first: parents before children, better siblings before worse ones.

    Attributes:
      sums: Sum of the scores along the path to each node, float32 [B, G], descending.
      depth: Draft position of the token, int32 [B, G]; 0 for the position after the anchor.
      rank: Rank of the token among the candidates of its draft position, int32 [B, G]; 0 for the
        best.
      parents: Row of the parent, int32 [B, G]; see `Proposal`.
    """

    sums: jax.Array
    depth: jax.Array
    rank: jax.Array
    parents: jax.Array


def propose(
    logits: jax.Array,
    positions: jax.Array,
    sampler: Sampler,
    budget: int,
    calibration: Calibration = (),
) -> Proposal:
    """Proposes the tree of the `budget` most likely prefixes of a block.

    Args:
      logits: Logits of D independent draft positions, float32 [B, D, V].
      positions: Absolute positions of the tokens, int32 [B, D].
      sampler: Ranks the candidates of each draft position.
      budget: Number of drafts, G, at most the capacity in `check_budget`.
      calibration: Calibration of the candidates' scores; empty for none.
    """
    candidates = sampler.candidates(logits, positions, min(budget, logits.shape[-1]))
    scores = candidates.scores
    if calibration:
        scores = log_chances(scores, by_depth(calibration, scores.shape[1]))
    nodes = best_first(scores, budget)
    batch = jnp.arange(logits.shape[0])[:, None]
    tokens = candidates.tokens[batch, nodes.depth, nodes.rank]
    drawn_from = None if candidates.probs is None else nodes.depth
    return Proposal(tokens, nodes.parents, candidates.probs, drawn_from, jnp.exp(nodes.sums))


def best_first(scores: jax.Array, budget: int) -> Nodes:
    """Returns the `budget` prefixes with the largest sums of scores.

    The search is exact; ties are broken arbitrarily. Scores are at most 0, so the best prefixes of
    each length extend the best prefixes that are one token shorter. With parents and candidates
    both sorted, the sum of parent i and candidate j is at most as large as (i + 1)(j + 1) - 1 other
    sums. Only pairs with (i + 1)(j + 1) <= budget therefore need to be compared.

    Args:
      scores: Scores float32 [B, D, k], descending along k and at most 0. k is the smaller of the
        budget and the size of the vocabulary.
      budget: Number of nodes, G.
    """
    batch, depths, count = scores.shape
    each = jnp.arange(batch)[:, None]
    sums = jnp.zeros((batch, 1), scores.dtype)
    # First nodes of the previous level and of this level.
    levels, before, begin = [], 0, 0
    for depth in range(depths):
        parent, rank = _pairs(sums.shape[1], count, budget)
        pairs = sums[:, parent] + scores[:, depth, rank]
        sums, best = jax.lax.top_k(pairs, min(budget, len(parent)))
        parent, rank = jnp.asarray(parent)[best], jnp.asarray(rank)[best]
        # The parent of the first level is the anchor, which is not a node.
        parent = parent + before if depth else jnp.full_like(parent, -1)
        levels.append((sums, jnp.full_like(rank, depth), rank, parent))
        before, begin = begin, begin + sums.shape[1]
    everything, depth, rank, parent = (
        jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True)
    )
    # `top_k` prefers the first of equal sums, and parents come before children and better siblings
    # before worse ones. So the parent and the better siblings of a chosen node are always chosen.
    sums, chosen = jax.lax.top_k(everything, budget)
    place = jnp.zeros(everything.shape, jnp.int32).at[each, chosen].set(jnp.arange(budget))
    parent = parent[each, chosen]
    parents = jnp.where(parent < 0, 0, place[each, parent] + 1)
    return Nodes(sums, depth[each, chosen], rank[each, chosen], parents)


def check_budget(budget: int, depths: int, vocab_size: int) -> None:
    """Raises ConfigError if a tree over this many draft positions cannot have `budget` nodes."""
    capacity = sum(vocab_size**depth for depth in range(1, depths + 1))
    if budget > capacity:
        raise errors.ConfigError(
            f"drafter.tree.budget: {budget} exceeds the block's capacity of {capacity} drafts at "
            f"{depths} draft position{'s' if depths > 1 else ''} of {vocab_size} tokens; lower "
            "it, or raise drafter.block_size"
        )


def _pairs(parents: int, count: int, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs (parents, ranks), int32 [N] each, that may be among the best `budget`."""
    parent, rank = np.meshgrid(
        np.arange(parents, dtype=np.int32), np.arange(count, dtype=np.int32), indexing="ij"
    )
    likely = (parent + 1) * (rank + 1) <= budget
    return parent[likely], rank[likely]
