"""Verification of drafts: the accepted tokens, and the bonus token that the target adds.

Coupled verification accepts a draft iff it equals the token that the target itself draws with the
noise of that position; the output is then the same, token for token, as without drafting. Rejection
follows the target's distribution without fixing the tokens.

A draft of -1 stands for one that the target has not verified, as do all drafts after it. Every rule
ends the draft before it, and the bonus token follows. A rejection rule then needs that the number
of verified drafts does not depend on the drawn tokens, nor on the noise that it uses.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash.inference.cycle.tree import Tree, accepted_path, path_to
from dflash.inference.logits import sampling
from dflash.inference.logits.sampling import SamplingParams


class VerifyResult(NamedTuple):
    """Result of verifying R = G + 1 rows.

    Attributes:
      num_accepted: int32 [B] in [0, G].
      path: int32 [B, max_depth + 1] or None; row at each depth of the accepted path. None means a
        chain, in which row i is at depth i.
      next_token: int32 [B]; the bonus token, which follows the accepted path.
      sampled: int32 [B, R] or None; the target's own token after each row, if the rule draws it.
    """

    num_accepted: jax.Array
    path: jax.Array | None
    next_token: jax.Array
    sampled: jax.Array | None = None

    def along(self, rows: jax.Array) -> jax.Array:
        """Returns the rows [B, R, …] of the accepted path, in order; a chain keeps all of its rows.

        Only the first num_accepted + 1 of them are valid.
        """
        if self.path is None:
            return rows
        path = self.path.reshape(*self.path.shape, *[1] * (rows.ndim - 2))
        return jnp.take_along_axis(rows, path, axis=1)

    def on_path(self, num_accepted: jax.Array, count: int) -> jax.Array:
        """Returns which of `count` drafts are the first ones of the accepted path, bool [B, count].

        Args:
          num_accepted: int32 [B]; number of drafts of the path to count.
        """
        if self.path is None:
            return jnp.arange(count) < num_accepted[:, None]
        counted = jnp.arange(self.path.shape[1]) <= num_accepted[:, None]
        slots = jnp.arange(num_accepted.shape[0])[:, None]
        # Row 0 is the anchor. Entries past the path get an index that the scatter drops.
        taken = jnp.zeros((slots.shape[0], count + 1), bool)
        taken = taken.at[slots, jnp.where(counted, self.path, count + 1)].set(True, mode="drop")
        return taken[:, 1:]

    def following(self, tokens: jax.Array) -> jax.Array:
        """Returns the tokens after the anchor along the accepted path, ending with the bonus token.

        Only the first num_accepted + 1 entries are valid.

        Args:
          tokens: int32 [B, R]; anchors and drafts.
        """
        following = jnp.roll(self.along(tokens), -1, axis=1)
        is_bonus = jnp.arange(following.shape[1]) == self.num_accepted[:, None]
        return jnp.where(is_bonus, self.next_token[:, None], following)


def coupled_chain(draft: jax.Array, sampled: jax.Array) -> VerifyResult:
    """Accepts the longest prefix of each draft that equals the target's own samples.

    Args:
      draft: int32 [B, G]; column 0 follows the anchor.
      sampled: int32 [B, G + 1]; the target's token after each row.
    Raises:
      ValueError: G differs between the two.
    Source: Leviathan et al. 2023, section 2, with the noise of both sides coupled.
    """
    if draft.shape[1] + 1 != sampled.shape[1]:
        raise ValueError(f"draft {draft.shape} does not fit sampled {sampled.shape}")
    matches = draft == sampled[:, :-1]
    num_accepted = jnp.cumprod(matches, axis=1, dtype=jnp.int32).sum(axis=1)
    return VerifyResult(num_accepted, None, _pick(sampled, num_accepted), sampled)


def coupled_tree(draft: jax.Array, sampled: jax.Array, tree: Tree) -> VerifyResult:
    """Accepts the longest path of each tree that equals the target's own samples.

    Args:
      draft: int32 [B, G].
      sampled: int32 [B, G + 1]; the target's token after each row.
    """
    matches = draft == jnp.take_along_axis(sampled, tree.parents, axis=1)
    path, num_accepted = accepted_path(tree, matches)
    next_token = _pick(sampled, _pick(path, num_accepted))
    return VerifyResult(num_accepted, path, next_token, sampled)


def rejection_chain(
    draft: jax.Array,
    draft_probs: jax.Array,
    logits: jax.Array,
    positions: jax.Array,
    params: SamplingParams,
) -> VerifyResult:
    """Accepts each draft with probability min(1, p / q) and redraws the first rejected one.

    p is the target's and q the drafter's probability of the draft. The redraw follows
    max(0, p - q), renormalised; where all drafts are accepted the bonus token follows p.

    Args:
      draft: int32 [B, G].
      draft_probs: float32 [B, G, V]; the distributions that the drafts were drawn from.
      logits: float32 [B, G + 1, V]; the target's, after each row.
      positions: int32 [B, G + 1]; of the tokens that the rows predict.
    Raises:
      ValueError: G differs between the arguments.
    Source: Leviathan et al. 2023, algorithm 1.
    """
    batch, drafts = draft.shape
    if draft_probs.shape[:2] != (batch, drafts) or logits.shape[1] != drafts + 1:
        raise ValueError(
            f"draft {draft.shape}, draft_probs {draft_probs.shape}, logits {logits.shape} differ"
        )
    verified = draft >= 0
    target_probs = sampling.probabilities(logits, params)
    rest = jnp.where(verified[..., None], draft_probs, 0.0)

    def of_drafts(probs):
        return jnp.take_along_axis(probs, draft[..., None], axis=-1)[..., 0]

    p = jnp.where(verified, of_drafts(target_probs[:, :-1]), 0.0)
    q = of_drafts(rest)
    threshold = sampling.uniform(positions[:, :-1], params, sampling.ACCEPT)
    accepted = threshold * q < p
    num_accepted = jnp.cumprod(accepted, axis=1, dtype=jnp.int32).sum(axis=1)
    # The bonus token after the whole draft was not drafted.
    rest = jnp.pad(rest, ((0, 0), (0, 1), (0, 0)))
    last = num_accepted[:, None, None]
    after = (jnp.take_along_axis(probs, last, axis=1)[:, 0] for probs in (target_probs, rest))
    next_token = _redraw(_residual(*after), _pick(positions, num_accepted), params)
    return VerifyResult(num_accepted, None, next_token)


def rejection_tree(
    draft: jax.Array,
    draft_probs: jax.Array,
    drawn_from: jax.Array,
    logits: jax.Array,
    positions: jax.Array,
    params: SamplingParams,
    tree: Tree,
) -> VerifyResult:
    """Walks down a tree: tries the children of a row in turn, and continues from an accepted one.

    A child is accepted with probability min(1, p / q). Here q is the distribution that all siblings
    were drawn from, without the tokens of earlier siblings and renormalised. Refusing a child turns
    p into max(0, p - q), renormalised, for the next sibling. After the last child the bonus token
    follows p. This is lossless because a child follows q given its earlier siblings, and because
    the number of children does not depend on what was drawn. Siblings past the last token with
    nonzero mass were not drawn: for them q is one-hot at the token itself.

    Args:
      draft: int32 [B, G].
      draft_probs: float32 [B, Q, V]; the distributions that the drafts were drawn from.
      drawn_from: int32 [B, G]; row of `draft_probs` of each draft.
      logits: float32 [B, G + 1, V]; the target's, after each row.
      positions: int32 [B, G + 1]; of the tokens that the rows predict.
    Raises:
      ValueError: G differs between the arguments.
    Source: recursive rejection sampling without replacement, Jeon et al. 2024, arXiv 2402.14160.
    """
    batch, drafts = draft.shape
    if drawn_from.shape != draft.shape or logits.shape[1] != drafts + 1:
        raise ValueError(
            f"draft {draft.shape}, drawn_from {drawn_from.shape}, logits {logits.shape} differ"
        )

    def target_probs(row):
        chosen = jnp.take_along_axis(logits, row[:, None, None], axis=1)
        return sampling.probabilities(chosen, params)[:, 0]

    def try_next_child(walk):
        row, tried, p, _ = walk
        has_child, child, earlier = _next_child(tree, draft >= 0, row, tried)
        token, origin = _pick(draft, child), _pick(drawn_from, child)
        all_probs = jnp.take_along_axis(draft_probs, origin[:, None, None], axis=1)[:, 0]
        q = _left_over(all_probs, draft, earlier, token)
        position = _pick(positions, row)[:, None]
        threshold = sampling.uniform(position, params, sampling.ACCEPT, child[:, None])[:, 0]
        accepted = has_child & (threshold * _pick(q, token) < _pick(p, token))
        rejected = has_child & ~accepted
        p = jnp.where(rejected[:, None], _residual(p, q), p)
        p = jnp.where(accepted[:, None], target_probs(child + 1), p)
        row = jnp.where(accepted, child + 1, row)
        return row, jnp.where(has_child, child, tried), p, has_child

    anchor = jnp.zeros((batch,), jnp.int32)
    begin = anchor, anchor - 1, target_probs(anchor), jnp.ones((batch,), bool)
    leaf, _, p, _ = jax.lax.while_loop(lambda walk: jnp.any(walk[-1]), try_next_child, begin)
    path, num_accepted = path_to(tree, leaf)
    return VerifyResult(num_accepted, path, _redraw(p, _pick(positions, leaf), params))


def _next_child(tree: Tree, verified: jax.Array, row: jax.Array, tried: jax.Array):
    """Returns the first verified child, by the mask [B, G], of row[b] past draft tried[b].

    Returns:
      Whether there is one, bool [B]; child int32 [B]; mask of its earlier siblings, bool [B, G].
    """
    index = jnp.arange(tree.parents.shape[1])
    siblings = (tree.parents == row[:, None]) & verified
    untried = siblings & (index > tried[:, None])
    child = jnp.argmax(untried, axis=1).astype(jnp.int32)
    return untried.any(axis=1), child, siblings & (index < child[:, None])


def _left_over(probs: jax.Array, draft: jax.Array, earlier: jax.Array, token: jax.Array):
    """Returns the distribution [B, V] of a token that was drawn after its earlier siblings.

    That is probs [B, V] without the siblings' tokens, renormalised; one-hot at the token itself if
    that leaves it no mass.
    """
    keep = jnp.where(earlier, 0.0, 1.0)
    rest = probs.at[jnp.arange(draft.shape[0])[:, None], draft].multiply(keep)
    mass = rest.sum(axis=-1, keepdims=True)
    certain = jax.nn.one_hot(token, probs.shape[-1], dtype=probs.dtype)
    drawn = _pick(rest, token)[:, None] > 0
    return jnp.where(drawn, rest / jnp.where(drawn, mass, 1.0), certain)


def _residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns max(0, p - q), renormalised over the last axis.

    Where p and q are exactly equal, the difference is zero everywhere and p itself is returned:
    only rounding can have rejected the draft.
    """
    rest = jnp.maximum(p - q, 0.0)
    mass = rest.sum(axis=-1, keepdims=True)
    return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), p)


def _redraw(probs: jax.Array, position: jax.Array, params: SamplingParams) -> jax.Array:
    """Draws one token per sequence, int32 [B], at position int32 [B], from probs [B, V]."""
    keys = sampling.position_keys(params.seed, position[:, None], sampling.RESIDUAL)[:, 0]
    return jax.vmap(jax.random.categorical)(keys, jnp.log(probs)).astype(jnp.int32)


def _pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows[b, index[b]] for rows [B, R] and index int32 [B]."""
    return jnp.take_along_axis(rows, index[:, None], axis=1)[:, 0]
