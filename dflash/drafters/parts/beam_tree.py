"""Trees of a drafter that drafts token by token: a beam of nodes is extended, level by level.

Every level extends the best nodes of the level before; of all nodes the best are drafted. A node is
ranked by the sum of scores along its path.

Source: EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash import errors
from dflash.drafters.base import Candidates, Proposal
from dflash.drafters.eagle3_config import BeamTree


class Beam(NamedTuple):
    """The k nodes of a level that are to be extended, the best first.

    Attributes:
      tokens: int32 [B, k].
      sums: float32 [B, k]; of the scores along their paths.
      nodes: int32 [B, k]; their numbers in the order of creation.
      parents: int32 [B, k]; place in the beam before of the node that each one continues.
    """

    tokens: jax.Array
    sums: jax.Array
    nodes: jax.Array
    parents: jax.Array


# (what the drafter carries, beam, level) -> candidates [B, k, k] after each node, and what it
# carries on. `level` 1 extends children of the anchor.
Extend = Callable[[Any, Beam, jax.Array], tuple[Candidates, Any]]


def grow(first: Candidates, carried: Any, extend: Extend, options: BeamTree) -> Proposal:
    """Grows a tree of `options.budget` drafts.

    Nodes are numbered as they are created: by level, then by their parent's place in the beam, then
    by rank. Drafts keep that order.

    Args:
      first: [B, 1, k]; what may follow the anchor.
      carried: state of the drafter, before level 1.
      extend: see `Extend`.
      options: width, depth and size of the tree.
    Returns:
      A proposal with probabilities where `first` has them: each draft then has probability 1, as
      the tree does not depend on the noise that verification draws with.
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

        _, rest = jax.lax.scan(step, (beam, carried), jnp.arange(1, options.depth))
        levels.append([part.swapaxes(0, 1).reshape(batch, -1) for part in rest])
    tokens, sums, parents = (jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True))
    proposal = choose(tokens, sums, parents, options.budget)
    if first.probs is None:
        return proposal
    certain = jax.nn.one_hot(proposal.tokens, first.probs.shape[-1], dtype=first.probs.dtype)
    return Proposal(proposal.tokens, proposal.parents, certain)


def choose(tokens: jax.Array, sums: jax.Array, parents: jax.Array, budget: int) -> Proposal:
    """The `budget` nodes with the largest sums.

    Args:
      tokens: int32 [B, M]; of all nodes, in the order of creation.
      sums: float32 [B, M]; no child's is larger than its parent's.
      parents: int32 [B, M]; nodes that they continue, -1 for the anchor.
      budget: G.
    """
    batch = jnp.arange(tokens.shape[0])[:, None]
    # Of equal sums the first counts, so a chosen node's parent is always chosen.
    chosen = jnp.sort(jax.lax.top_k(sums, budget)[1], axis=1)
    rows = jnp.zeros(tokens.shape, jnp.int32).at[batch, chosen].set(1 + jnp.arange(budget))
    parents = parents[batch, chosen]
    parents = jnp.where(parents < 0, 0, rows[batch, jnp.maximum(parents, 0)])
    return Proposal(tokens[batch, chosen], parents)


def check(options: BeamTree, vocab_size: int) -> None:
    """Raises ConfigError if no such tree can be grown from a vocabulary of this size."""
    if options.top_k > vocab_size:
        raise errors.ConfigError(
            f"drafter.tree.top_k: {options.top_k} is more than the {vocab_size} tokens that can be "
            "drafted"
        )
    capacity = options.top_k + (options.depth - 1) * options.top_k**2
    if options.budget > capacity:
        raise errors.ConfigError(
            f"drafter.tree.budget: {options.budget} is larger than the tree's capacity, {capacity} "
            f"drafts with top_k={options.top_k} and depth={options.depth}; lower it, or raise those"
        )


def _flatten(beam: Beam, candidates: Candidates) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, sums and parents [B, k·k] of all candidates, by parent and then by rank."""
    sums = beam.sums[..., None] + candidates.scores
    parents = jnp.broadcast_to(beam.nodes[..., None], sums.shape)
    batch = sums.shape[0]
    return tuple(part.reshape(batch, -1) for part in (candidates.tokens, sums, parents))


def _best(beam: Beam, tokens: jax.Array, sums: jax.Array, begin: jax.Array) -> Beam:
    """The next beam, of nodes begin … begin + k·k - 1."""
    width = beam.tokens.shape[1]
    best, index = jax.lax.top_k(sums, width)
    tokens = jnp.take_along_axis(tokens, index, axis=1)
    return Beam(tokens, best, begin + index, index // width)
