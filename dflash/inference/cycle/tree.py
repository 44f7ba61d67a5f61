"""Token trees: the rows of a verified block, their ancestors, and the accepted path."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """Token tree of R = G + 1 rows: the anchor (row 0, the root) and G drafts.

    Attributes:
      ancestry: bool [B, R, R]; entry [b, r, c]: c is r itself or an ancestor of r. This is the
        attention mask of the rows.
      depth: int32 [B, R]; 0 for the anchor.
      parents: int32 [B, G]; row that draft g continues.
      max_depth: Upper bound on the depth of a row; static.
    """

    ancestry: jax.Array
    depth: jax.Array
    parents: jax.Array
    max_depth: int = dataclasses.field(metadata={"static": True})


def from_parents(parents: jax.Array, max_depth: int | None = None) -> Tree:
    """Builds the tree in which draft g (row g + 1) continues row parents[b, g] <= g.

    Args:
      parents: int32 [B, G].
      max_depth: Upper bound on the depth of a row; None means G.
    """
    max_depth = parents.shape[1] if max_depth is None else max_depth
    batch, drafts = parents.shape
    rows = drafts + 1
    # Entries are 0 or 1, and sums are only compared with 0: exact in floats of any width.
    step = jax.nn.one_hot(parents, rows, dtype=jnp.float32)
    step = jnp.concatenate([jnp.zeros((batch, 1, rows), jnp.float32), step], axis=1)
    reach = jnp.eye(rows, dtype=jnp.float32) + step
    # Squaring doubles the number of generations that `reach` spans: one, to begin with.
    for _ in range(max(0, max_depth - 1).bit_length()):
        reach = jnp.minimum(reach @ reach, 1.0)
    ancestry = reach > 0
    return Tree(ancestry, ancestry.sum(axis=-1, dtype=jnp.int32) - 1, parents, max_depth)


def accepted_path(tree: Tree, matches: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the longest path from the anchor along which every draft matches.

    Args:
      matches: bool [B, G]; draft g equals the target's token after its parent.
    Returns:
      path int32 [B, max_depth + 1] and num_accepted int32 [B]; see `path_to`.
    """
    batch = matches.shape[0]
    good = jnp.concatenate([jnp.ones((batch, 1), bool), matches], axis=1)
    accepted = jnp.all(good[:, None, :] | ~tree.ancestry, axis=-1)
    depth = jnp.where(accepted, tree.depth, -1)
    return path_to(tree, jnp.argmax(depth, axis=-1))


def path_to(tree: Tree, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows from the anchor to row leaf[b], with leaf int32 [B].

    Returns:
      path int32 [B, max_depth + 1]: entry i is the row at depth i of the path, for i up to its
      length; entries past that are meaningless. num_accepted int32 [B], the depth of the leaf.
    """
    on_path = jnp.take_along_axis(tree.ancestry, leaf[:, None, None], axis=1)[:, 0]
    depths = jnp.arange(tree.max_depth + 1)
    at_depth = on_path[:, None, :] & (tree.depth[:, None, :] == depths[:, None])
    num_accepted = jnp.take_along_axis(tree.depth, leaf[:, None], axis=1)[:, 0]
    return jnp.argmax(at_depth, axis=-1).astype(jnp.int32), num_accepted
