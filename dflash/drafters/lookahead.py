"""Lookahead decoding: guesses of the next tokens, which the target refines while it verifies.

Source: Fu et al. 2024, arXiv 2402.02057. Besides the anchor, a verified block has two kinds of
rows: n-grams from a pool that begin with the anchor, and a window of W columns and L = n - 1
levels, which are the last L Jacobi iterations for the next W positions. The target's tokens after
the last level are the next iteration, and each column together with its new token is an n-gram for
the pool.

Here window and n-grams are branches of the same tree, so that all rows are verified alike and rows
of the window can be accepted too. The oldest level of the window is a chain from the anchor, the
trunk; level k of column c continues level k - 1 of that column. Sampled sequences are solved in the
same way as greedy ones: the noise is a function of the position, so the iterations converge to the
tokens that the target draws.

The state stores a token as its id + 1, so that 0 means no token.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.config.schema import MAX_BLOCK_SIZE
from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.lookahead_config import LookaheadConfig
from dflash.layers.cache import batch_axes
from dflash.parallel.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookaheadState:
    """Guesses for B sequences, with tokens stored as id + 1.

    Attributes:
      window: Jacobi iterations, int32 [B, L, W]; level k of column c is c + k + 1 positions after
        the anchor.
      rows: Rows of the proposal that hold the last level of each column, int32 [B, W].
      recent: Last tokens before the anchor, int32 [B, W + L].
      pool: Distinct n-grams, newest first, int32 [B, P, n].
    """

    window: jax.Array
    rows: jax.Array
    recent: jax.Array
    pool: jax.Array


class Lookahead(Drafter):
    """Lookahead drafter, which has no weights."""

    prefix_cache_mode = "tokens"

    def __init__(
        self,
        *,
        window: int,
        ngram_size: int,
        candidates: int,
        pool_size: int,
        vocab_size: int,
        sharding: Sharding,
    ):
        """Sets the sizes of window, n-grams and pool; see `LookaheadConfig`.

        Raises:
          ConfigError: The pool is smaller than the number of candidates, the block exceeds the
            maximum block size, or the vocabulary is too small for the tree.
        """
        if pool_size < candidates:
            raise errors.ConfigError(
                f"drafter.pool_size: {pool_size} is smaller than drafter.candidates={candidates}; "
                "raise pool_size or lower candidates"
            )
        self.window, self.levels = window, ngram_size - 1
        self.candidates, self.pool_size = candidates, pool_size
        self.num_draft_tokens = self.levels * (window + candidates)
        if self.block_size > MAX_BLOCK_SIZE:
            raise errors.ConfigError(
                f"drafter.window: {self.num_draft_tokens} drafts do not fit in a block of at most "
                f"{MAX_BLOCK_SIZE} rows; lower window, ngram_size or candidates"
            )
        if vocab_size < self.num_draft_tokens:
            raise errors.ConfigError(
                f"drafter.window: {self.num_draft_tokens} drafts need as many distinct tokens, but "
                f"the target has {vocab_size}; lower window, ngram_size or candidates"
            )
        self.sharding = sharding

    @classmethod
    def create(cls, config: LookaheadConfig, hf, target, *, dtype, sharding):
        return cls(
            window=config.window,
            ngram_size=config.ngram_size,
            candidates=config.candidates,
            pool_size=config.pool_size,
            vocab_size=target.vocab_size,
            sharding=sharding,
        )

    @property
    def longest_path(self) -> int:
        """Number of rows on the longest path, which is the trunk and then the last column."""
        return self.window + self.levels

    @property
    def has_confidence(self) -> bool:
        return False

    def init_state(self, batch, max_length):
        """Returns an abstract state, whose size does not depend on `max_length`."""
        name, _ = batch_axes(batch, self.sharding)

        def tokens(*shape):
            names = (name, *(None for _ in shape))
            return self.sharding.abstract((batch, *shape), names, jnp.int32)

        return LookaheadState(
            window=tokens(self.levels, self.window),
            rows=tokens(self.window),
            recent=tokens(self.window + self.levels),
            pool=tokens(self.pool_size, self.levels + 1),
        )

    def draft(self, state, anchor, position, sampler, heads):
        window = self._complete(state, anchor)
        grams = find_candidates(state.pool, anchor, self.candidates, default=window[:, :, 0])
        batch = anchor.shape[0]
        nodes = jnp.concatenate([window.reshape(batch, -1), grams.reshape(batch, -1)], axis=1)
        layout = tree_layout(self.window, self.levels, self.candidates)
        tokens, parents, rows = merge_alike(nodes, layout)
        last_level = slice((self.levels - 1) * self.window, self.levels * self.window)
        state = dataclasses.replace(state, window=window + 1, rows=rows[:, last_level])
        return Proposal(tokens, parents), state

    def review(self, state, proposal, sampled):
        """Adds a Jacobi iteration, and puts an n-gram per column into the pool."""
        newest = jnp.take_along_axis(sampled, state.rows, axis=1)[:, None] + 1
        columns = jnp.concatenate([state.window, newest], axis=1)
        pool = remember(state.pool, columns.swapaxes(1, 2))
        return dataclasses.replace(state, window=columns[:, 1:], pool=pool)

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Moves the window, and puts the n-grams of committed tokens into the pool."""
        # `review` has dropped the first level, which already moved the window by one position.
        columns = jnp.arange(self.window) + jnp.maximum(num_committed - 1, 0)[:, None]
        moved = jnp.take_along_axis(state.window, columns[:, None], axis=2, mode="clip")
        window = jnp.where((columns < self.window)[:, None], moved, 0)

        history = jnp.concatenate([state.recent, tokens + 1], axis=1)
        length = state.recent.shape[1]
        begin = jnp.arange(length) + num_committed[:, None]
        recent = jnp.take_along_axis(history, begin, axis=1)
        # Each committed token is the last one of an n-gram. Order them newest first.
        size, count = self.levels + 1, tokens.shape[1] - 1
        ends = np.arange(count, 0, -1)
        grams = history[:, (length + ends)[:, None] + np.arange(1 - size, 1)]
        grams = jnp.where((ends <= num_committed[:, None])[..., None], grams, 0)
        return LookaheadState(window, state.rows, recent, remember(state.pool, grams))

    def _complete(self, state: LookaheadState, anchor: jax.Array) -> jax.Array:
        """Returns the window as token ids, without gaps.

        Missing guesses repeat the last committed tokens, or the anchor if there are too few.
        """
        history = jnp.concatenate([state.recent, anchor[:, None] + 1], axis=1)
        tail = history[:, -(self.window + self.levels - 1) :]
        tail = jnp.where(tail > 0, tail, anchor[:, None] + 1)
        ahead = np.arange(self.levels)[:, None] + np.arange(self.window)
        return jnp.where(state.window > 0, state.window, tail[:, ahead]) - 1


def find_candidates(
    pool: jax.Array, anchor: jax.Array, count: int, *, default: jax.Array
) -> jax.Array:
    """Returns the continuations of the anchor in the newest n-grams that begin with it.

    Args:
      pool: N-grams, int32 [B, P, n], stored as id + 1.
      anchor: Last committed tokens, int32 [B].
      count: Number of n-grams to return.
      default: Token ids that replace missing n-grams, int32 [B, n - 1].
    Returns:
      Token ids, int32 [B, count, n - 1].
    """
    begins = pool[:, :, 0] == anchor[:, None] + 1
    order = jnp.argsort(~begins, axis=1, stable=True)[:, :count]
    continuations = jnp.take_along_axis(pool[:, :, 1:], order[..., None], axis=1) - 1
    matches = jnp.take_along_axis(begins, order, axis=1)
    return jnp.where(matches[..., None], continuations, default[:, None])


def remember(pool: jax.Array, grams: jax.Array) -> jax.Array:
    """Prepends n-grams to a pool, without duplicates, and drops the oldest ones.

    Args:
      pool: N-grams, int32 [B, P, n], stored as id + 1.
      grams: New n-grams, newest first, int32 [B, M, n], stored as id + 1. Those that contain a 0
        are ignored.
    """
    together = jnp.concatenate([grams, pool], axis=1)
    total, new = together.shape[1], grams.shape[1]
    same = jnp.all(together[:, :, None] == grams[:, None], axis=-1)
    newer = np.arange(new) < np.arange(total)[:, None]
    keep = jnp.all(together > 0, axis=-1) & ~jnp.any(same & newer, axis=-1)
    order = jnp.argsort(~keep, axis=1, stable=True)[:, : pool.shape[1]]
    first = jnp.take_along_axis(keep, order, axis=1)
    return jnp.where(first[..., None], jnp.take_along_axis(together, order[..., None], axis=1), 0)


def tree_layout(window: int, levels: int, candidates: int) -> np.ndarray:
    """Returns the paths of the tree's nodes: the window level by level, then each candidate.

    Returns:
      int32 [G, depth]; row g lists the nodes from the anchor's child down to node g, then -1.
    """
    parents = [column - 1 for column in range(window)]
    parents += range((levels - 1) * window)
    for _ in range(candidates):
        first = len(parents)
        parents += [-1, *range(first, first + levels - 1)]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    depth = max(map(len, paths))
    return np.array([path + [-1] * (depth - len(path)) for path in paths], np.int32)


def merge_alike(tokens: jax.Array, layout: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges nodes with equal paths of tokens, because siblings must be different tokens.

    The first of equal nodes is kept. The rows of the others become filler: children of the anchor
    with token ids below G that no other child has.

    Args:
      tokens: Tokens of the nodes, int32 [B, G].
      layout: Paths of the nodes, int32 [G, depth]; see `tree_layout`.
    Returns:
      Tokens and parents for a `Proposal`, and the row of each node; int32 [B, G] each.
    """
    drafts = layout.shape[0]
    paths = jnp.where(layout >= 0, tokens[:, layout], -1)
    same = jnp.all(paths[:, :, None] == paths[:, None], axis=-1)
    first = jnp.argmax(same, axis=-1).astype(jnp.int32)
    spare = first < jnp.arange(drafts)

    depth = (layout >= 0).sum(axis=1)
    parent = np.where(depth > 1, layout[np.arange(drafts), depth - 2], -1)
    parents = jnp.where(parent < 0, 0, first[:, parent] + 1)

    children = np.flatnonzero(depth == 1)
    ids = jnp.arange(drafts + len(children), dtype=jnp.int32)
    in_use = jnp.any(tokens[:, children, None] == ids, axis=1)
    free = jnp.argsort(in_use, axis=1, stable=True).astype(jnp.int32)
    turn = jnp.cumsum(spare, axis=1) - 1
    filler = jnp.take_along_axis(free, jnp.maximum(turn, 0), axis=1)
    return jnp.where(spare, filler, tokens), jnp.where(spare, 0, parents), first + 1
