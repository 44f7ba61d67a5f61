"""Beam search that grows the tree of a sequential drafter, level by level.

Each level extends the best nodes of the previous level, and the best nodes of all levels are
drafted. Nodes are ranked by the sum of the scores along their paths.

Source: EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash import errors
from dflash.drafters.base import Proposal
from dflash.drafters.eagle3_config import BeamTree
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


# (carry, beam, level) -> (candidates [B, k, k] after each node, new carry). The carry is the state
# of the drafter between levels. Level 1 extends the children of the anchor.
Extend = Callable[[Any, Beam, jax.Array], tuple[Candidates, Any]]


def grow(first: Candidates, carried: Any, extend: Extend, options: BeamTree) -> Proposal:
    """Grows a tree of `options.budget` drafts.

    Nodes are numbered in the order of creation: by level, then by their parent's index in the beam,
    then by rank. Drafts are ordered by the sums of their scores, best first.

    Args:
      first: Candidates after the anchor, [B, 1, k].
      carried: State of the drafter before level 1.
      extend: Runs the drafter over a beam; see `Extend`.
    Returns:
      A proposal, with probabilities if `first` has them. Each draft then has probability 1, because
      the tree does not depend on the noise of the verification.
    """
    width = options.top_k
    tokens, sums = first.tokens[:, 0], first.scores[:, 0]
    batch = tokens.shape[0]
    nodes = jnp.broadcast_to(jnp.arange(width), (batch, width))
    beam = Beam(tokens, sums, nodes, jnp.zeros_like(nodes))
    levels = [(tokens, sums, jnp.full_like(nodes, -1))]
    if options.depth > 1:

        def step(carry, level):
            beam, carried = carry
            candidates, carried = extend(carried, beam, level)
            flat = _flatten(beam, candidates)
            begin = width + (level - 1) * width**2
            return (_best(beam, *flat[:2], begin), carried), flat

        _, later = jax.lax.scan(step, (beam, carried), jnp.arange(1, options.depth))
        levels.append([part.swapaxes(0, 1).reshape(batch, -1) for part in later])
    tokens, sums, parents = (jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True))
    proposal = choose(tokens, sums, parents, options.budget)
    if first.probs is None:
        return proposal
    certain = jax.nn.one_hot(proposal.tokens, first.probs.shape[-1], dtype=first.probs.dtype)
    return dataclasses.replace(proposal, probs=certain)


def choose(tokens: jax.Array, sums: jax.Array, parents: jax.Array, budget: int) -> Proposal:
    """Returns a proposal of the `budget` nodes with the largest sums, in descending order.

    Args:
      tokens: Tokens of all nodes in the order of creation, int32 [B, M].
      sums: Sums of scores, float32 [B, M]; a child's is at most its parent's.
      parents: Indices of the nodes' parents, int32 [B, M]; -1 for the anchor.
      budget: Number of drafts, G.
    """
    batch = jnp.arange(tokens.shape[0])[:, None]
    # `top_k` prefers the first of equal sums, so the parent of a chosen node is chosen before it.
    sums, chosen = jax.lax.top_k(sums, budget)
    rows = jnp.zeros(tokens.shape, jnp.int32).at[batch, chosen].set(1 + jnp.arange(budget))
    parents = parents[batch, chosen]
    parents = jnp.where(parents < 0, 0, rows[batch, jnp.maximum(parents, 0)])
    return Proposal(tokens[batch, chosen], parents, confidence=jnp.exp(sums))


def check(options: BeamTree, vocab_size: int, *, depth_key: str = "depth") -> None:
    """Raises ConfigError if a vocabulary of this size is too small for the tree.

    Args:
      vocab_size: Number of tokens that can be drafted at each position.
      depth_key: Config key that sets the depth, for the message.
    """
    if options.top_k > vocab_size:
        raise errors.ConfigError(
            f"drafter.tree.top_k: {options.top_k} exceeds the draft vocabulary of {vocab_size} "
            "tokens"
        )
    capacity = options.top_k + (options.depth - 1) * options.top_k**2
    if options.budget > capacity:
        raise errors.ConfigError(
            f"drafter.tree.budget: {options.budget} exceeds the tree's capacity of {capacity} "
            f"drafts with top_k={options.top_k} and depth={options.depth}; lower budget, or raise "
            f"top_k or {depth_key}"
        )


def _flatten(beam: Beam, candidates: Candidates) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, sums and parents [B, k·k] of all candidates, by parent, then by rank."""
    sums = beam.sums[..., None] + candidates.scores
    parents = jnp.broadcast_to(beam.nodes[..., None], sums.shape)
    batch = sums.shape[0]
    return tuple(part.reshape(batch, -1) for part in (candidates.tokens, sums, parents))


def _best(beam: Beam, tokens: jax.Array, sums: jax.Array, begin: jax.Array) -> Beam:
    """Returns the next beam, chosen from nodes begin … begin + k·k - 1."""
    width = beam.tokens.shape[1]
    best, index = jax.lax.top_k(sums, width)
    tokens = jnp.take_along_axis(tokens, index, axis=1)
    return Beam(tokens, best, begin + index, index // width)
