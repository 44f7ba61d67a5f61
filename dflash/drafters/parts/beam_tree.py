"""Beam search that grows the tree of a sequential drafter, level by level.

Each level extends the k best nodes of the level before by k candidates each, and k of these nodes,
the best of the whole level, are kept. The drafts are the best of the kept nodes of all levels.
Nodes are ranked by the sum of the scores along their paths.

Source: DARTree, arXiv 2608.13524, and UBTree, arXiv 2609.39972, appendix A. EAGLE-2, arXiv
2406.16858, sections 4.1 and 4.2, also drafts nodes that are not kept, as leaves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash.drafters.base import Proposal
from dflash.drafters.parts.sampler import Candidates


class Beam(NamedTuple):
    """The k nodes of a level that are extended, best first.

    Attributes:
      tokens: Tokens of the nodes, int32 [B, k].
      sums: Sums of the scores along the nodes' paths, float32 [B, k].
      nodes: Indices of the nodes in the order of creation, int32 [B, k].
      parents: Indices of the nodes' parents in the previous beam, int32 [B, k].
    """

    tokens: jax.Array
    sums: jax.Array
    nodes: jax.Array
    parents: jax.Array


class Nodes(NamedTuple):
    """M nodes that may be drafted, in the order of creation.

    Attributes:
      tokens: int32 [B, M].
      sums: Sums of scores, float32 [B, M]; a child's is at most its parent's.
      parents: Indices of the nodes' parents, int32 [B, M]; -1 for the anchor.
    """

    tokens: jax.Array
    sums: jax.Array
    parents: jax.Array


# (carry, beam, level) -> (candidates [B, k, k] after each node, new carry). The carry is the state
# of the drafter between levels. Level 1 extends the children of the anchor.
Extend = Callable[[Any, Beam, jax.Array], tuple[Candidates, Any]]


def grow(
    first: Candidates,
    carried: Any,
    extend: Extend,
    *,
    budget: int,
    depth: int,
    with_leaves: bool = False,
) -> Proposal:
    """Grows a tree of `budget` drafts, ordered by the sums of their scores, best first.

    Args:
      first: Candidates after the anchor, [B, 1, k].
      carried: State of the drafter before level 1.
      extend: Runs the drafter over a beam; see `Extend`.
      depth: Number of levels.
      with_leaves: Whether nodes that are not kept may be drafted too.
    Returns:
      A proposal, with probabilities if `first` has them. Each draft then has probability 1, because
      the tree does not depend on the noise of the verification.
    """
    batch, _, width = first.tokens.shape
    per_level = width * width if with_leaves else width
    anchor = jnp.zeros((batch, 1), jnp.int32)
    root = Beam(anchor, jnp.zeros((batch, 1)), anchor - 1, anchor)
    beam, created = _level(root, first, 0, with_leaves)
    levels = [created]
    if depth > 1:

        def step(carry, level):
            beam, carried = carry
            candidates, carried = extend(carried, beam, level)
            begin = width + (level - 1) * per_level
            beam, created = _level(beam, candidates, begin, with_leaves)
            return (beam, carried), created

        _, later = jax.lax.scan(step, (beam, carried), jnp.arange(1, depth))
        levels.append(Nodes(*(part.swapaxes(0, 1).reshape(batch, -1) for part in later)))
    nodes = Nodes(*(jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True)))
    proposal = choose(nodes, budget)
    if first.probs is None:
        return proposal
    certain = jax.nn.one_hot(proposal.tokens, first.probs.shape[-1], dtype=first.probs.dtype)
    return dataclasses.replace(proposal, probs=certain)


def _level(
    beam: Beam, candidates: Candidates, begin: jax.Array | int, with_leaves: bool
) -> tuple[Beam, Nodes]:
    """Returns the next beam, and the nodes of its level that may be drafted, from `begin` on."""
    batch, _, k = candidates.tokens.shape
    tokens = candidates.tokens.reshape(batch, -1)
    sums = (beam.sums[..., None] + candidates.scores).reshape(batch, -1)
    # `top_k` prefers the first of equal sums: the better parent, then the better rank.
    best, index = jax.lax.top_k(sums, k)
    parents, kept = index // k, jnp.take_along_axis(tokens, index, axis=1)
    if with_leaves:
        created = Nodes(tokens, sums, jnp.repeat(beam.nodes, k, axis=1))
    else:
        created = Nodes(kept, best, jnp.take_along_axis(beam.nodes, parents, axis=1))
        index = jnp.broadcast_to(jnp.arange(k), index.shape)
    return Beam(kept, best, begin + index, parents), created


def choose(nodes: Nodes, budget: int) -> Proposal:
    """Returns a proposal of the `budget` nodes with the largest sums, in descending order."""
    tokens, sums, parents = nodes
    batch = jnp.arange(tokens.shape[0])[:, None]
    # `top_k` prefers the first of equal sums, so the parent of a chosen node is chosen before it.
    sums, chosen = jax.lax.top_k(sums, budget)
    rows = jnp.zeros(tokens.shape, jnp.int32).at[batch, chosen].set(1 + jnp.arange(budget))
    parents = parents[batch, chosen]
    parents = jnp.where(parents < 0, 0, rows[batch, jnp.maximum(parents, 0)])
    return Proposal(tokens[batch, chosen], parents, confidence=jnp.exp(sums))
