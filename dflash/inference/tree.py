"""Token trees: rows of a verified block, who descends from whom, and which path was accepted."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """R = G + 1 rows: the anchor (row 0, the root) and G drafts.

    Attributes:
      ancestry: bool [B, R, R]; entry [b, r, c]: c is r itself or an ancestor of r. This is the
        attention mask of the rows.
      depth: int32 [B, R]; 0 for the anchor.
      parents: int32 [B, G]; row that draft g continues.
    """

    ancestry: jax.Array
    depth: jax.Array
    parents: jax.Array


def from_parents(parents: jax.Array) -> Tree:
    """Builds the tree in which draft g (row g + 1) continues row parents[b, g] <= g.

    Args:
      parents: int32 [B, G].
    """
    batch, drafts = parents.shape
    rows = drafts + 1
    step = jax.nn.one_hot(parents, rows, dtype=jnp.int32)
    step = jnp.concatenate([jnp.zeros((batch, 1, rows), jnp.int32), step], axis=1)
    reach = jnp.eye(rows, dtype=jnp.int32) + step
    # Squaring doubles the number of generations that `reach` spans.
    for _ in range(max(1, (rows - 1).bit_length())):
        reach = jnp.minimum(reach @ reach, 1)
    ancestry = reach > 0
    return Tree(ancestry, ancestry.sum(axis=-1, dtype=jnp.int32) - 1, parents)


def accepted_path(tree: Tree, matches: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The longest path from the anchor along which every draft matches.

    Args:
      tree: of the rows.
      matches: bool [B, G]; draft g equals the target's token after its parent.
    Returns:
      path int32 [B, R]: entry i is the row at depth i of the path, for i up to its length; entries
      past that are rows too, but stand for nothing. num_accepted int32 [B] in [0, G].
    """
    batch, drafts = matches.shape
    good = jnp.concatenate([jnp.ones((batch, 1), bool), matches], axis=1)
    accepted = jnp.all(good[:, None, :] | ~tree.ancestry, axis=-1)
    depth = jnp.where(accepted, tree.depth, -1)
    leaf = jnp.argmax(depth, axis=-1)
    on_path = jnp.take_along_axis(tree.ancestry, leaf[:, None, None], axis=1)[:, 0]
    at_depth = on_path[:, None, :] & (tree.depth[:, None, :] == jnp.arange(drafts + 1)[:, None])
    return jnp.argmax(at_depth, axis=-1).astype(jnp.int32), depth.max(axis=-1)
