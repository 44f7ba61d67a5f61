"""Acceptance: which drafted tokens the target stands behind, and the token that it adds.

Coupled verification accepts a draft iff it equals the token that the target itself draws with the
noise of that position; the output is then the same, token for token, as without drafting. Rejection
verification follows the target's distribution without fixing the tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash.inference import sampling
from dflash.inference.sampling import SamplingParams
from dflash.inference.tree import Tree, accepted_path


class Verdict(NamedTuple):
    """What verification decided; R = G + 1 rows.

    Attributes:
      num_accepted: int32 [B] in [0, G].
      path: int32 [B, R] or None; row at each depth of the accepted path. None: a chain, in which
        row i is at depth i.
      next_token: int32 [B]; the bonus token, which follows the accepted path.
    """

    num_accepted: jax.Array
    path: jax.Array | None
    next_token: jax.Array


def coupled_chain(draft: jax.Array, sampled: jax.Array) -> Verdict:
    """Accepts the longest prefix of each draft that equals the target's own samples.

    Args:
      draft: int32 [B, G]; slot 0 follows the anchor.
      sampled: int32 [B, G + 1]; the target's token after each row.
    Raises:
      ValueError: G differs between the two.
    Source: Leviathan et al. 2023, section 2, with the noise of both sides coupled.
    """
    if draft.shape[1] + 1 != sampled.shape[1]:
        raise ValueError(f"draft {draft.shape} does not fit sampled {sampled.shape}")
    matches = draft == sampled[:, :-1]
    num_accepted = jnp.cumprod(matches, axis=1, dtype=jnp.int32).sum(axis=1)
    return Verdict(num_accepted, None, _pick(sampled, num_accepted))


def coupled_tree(draft: jax.Array, sampled: jax.Array, tree: Tree) -> Verdict:
    """Accepts the longest path of each tree that equals the target's own samples.

    Args:
      draft: int32 [B, G].
      sampled: int32 [B, G + 1]; the target's token after each row.
      tree: who continues whom.
    """
    matches = draft == jnp.take_along_axis(sampled, tree.parents, axis=1)
    path, num_accepted = accepted_path(tree, matches)
    return Verdict(num_accepted, path, _pick(sampled, _pick(path, num_accepted)))


def rejection_chain(
    draft: jax.Array,
    draft_probs: jax.Array,
    logits: jax.Array,
    positions: jax.Array,
    params: SamplingParams,
) -> Verdict:
    """Accepts each draft with probability min(1, p / q) and redraws the first refused one.

    p is the target's and q the drafter's probability of the draft. The redraw follows
    max(0, p - q), renormalised; after a whole accepted draft the target draws as it is.

    Args:
      draft: int32 [B, G].
      draft_probs: float32 [B, G, V]; the distributions that the drafts were drawn from.
      logits: float32 [B, G + 1, V]; the target's, after each row.
      positions: int32 [B, G + 1]; of the tokens that the rows predict.
      params: of the sequences.
    Raises:
      ValueError: G differs between the arguments.
    Source: Leviathan et al. 2023, algorithm 1.
    """
    batch, drafts = draft.shape
    if draft_probs.shape[:2] != (batch, drafts) or logits.shape[1] != drafts + 1:
        raise ValueError(
            f"draft {draft.shape}, draft_probs {draft_probs.shape}, logits {logits.shape} differ"
        )
    target_probs = sampling.probabilities(logits, params)
    p = jnp.take_along_axis(target_probs[:, :-1], draft[..., None], axis=-1)[..., 0]
    q = jnp.take_along_axis(draft_probs, draft[..., None], axis=-1)[..., 0]
    threshold = sampling.uniform(positions[:, :-1], params, sampling.ACCEPT)
    accepted = threshold * q < p
    num_accepted = jnp.cumprod(accepted, axis=1, dtype=jnp.int32).sum(axis=1)

    nothing = jnp.zeros_like(target_probs[:, :1])
    residual = jnp.maximum(target_probs - jnp.concatenate([draft_probs, nothing], axis=1), 0.0)
    # Where p and q agree to the last bit nothing is left over; rounding may still have refused.
    residual = jnp.where(residual.sum(axis=-1, keepdims=True) > 0, residual, target_probs)
    at = num_accepted[:, None, None]
    chosen = jnp.take_along_axis(residual, at, axis=1)
    position = jnp.take_along_axis(positions, num_accepted[:, None], axis=1)
    keys = sampling.position_keys(params.seed, position, sampling.RESIDUAL)
    redrawn = jax.vmap(jax.vmap(jax.random.categorical))(keys, jnp.log(chosen))[:, 0]
    return Verdict(num_accepted, None, redrawn.astype(jnp.int32))


def _pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[b, index[b]] for rows [B, R], index int32 [B]."""
    return jnp.take_along_axis(rows, index[:, None], axis=1)[:, 0]
