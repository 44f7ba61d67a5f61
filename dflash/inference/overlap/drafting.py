"""The drafter's part of overlapped decoding, as pure functions of arrays on its own devices."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Heads
from dflash.inference.logits.sampling import SamplingParams, SequenceSampler
from dflash.inference.overlap.forks import Copies
from dflash.inference.overlap.relay import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftingState:
    """State of the drafter's devices for a batch of B slots; see `guess`.

    Attributes:
      drafter: State of the drafter, which covers the positions before the anchors.
      ranked: Drafts that the target verifies, int32 [B, K + 1, F + 1].
      ahead: Drafts for the outcomes of that verification, int32 [B, K + 1, F, K + 1, F + 1].
    """

    drafter: Any
    ranked: jax.Array
    ahead: jax.Array


class Anchors(NamedTuple):
    """Last committed tokens int32 [B], lengths int32 [B] with them, and sampling of B sequences."""

    tokens: jax.Array
    length: jax.Array
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True)
class RankingSampler(SequenceSampler):
    """Sampler that returns the `count` best tokens of each position in place of probabilities."""

    count: int = 1

    def propose(self, logits: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns drawn tokens, int32 [B, T], and the best ones, int32 [B, T, count]."""
        ranked = self.candidates(logits, positions, self.count).tokens
        return ranked[..., 0], ranked


def guess(ranked: jax.Array) -> jax.Array:
    """Returns the best F bonus tokens after 0 … K accepted drafts, int32 [B, K + 1, F].

    The bonus token after a rejected draft differs from the draft.
    """
    return jnp.concatenate([ranked[:, :-1, 1:], ranked[:, -1:, :-1]], axis=1)


def look_up(
    bonus: jax.Array, ahead: jax.Array, num_accepted: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Looks up the outcome of each sequence: `num_accepted` drafts and the bonus token, int32 [B].

    Args:
      bonus: Foreseen bonus tokens, [B, K + 1, F]; see `guess`.
      ahead: Drafts after each outcome, int32 [B, K + 1, F, …].
    Returns:
      Whether the outcome was foreseen, bool [B], and its drafts, which are arbitrary otherwise.
    """
    each = jnp.arange(token.shape[0])
    matches = bonus[each, num_accepted] == token[:, None]
    return matches.any(axis=1), ahead[each, num_accepted, jnp.argmax(matches, axis=1)]


def continuations(
    anchor: jax.Array, drafts: jax.Array, bonus: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of every outcome; `anchor` is int32 [B].

    Returns:
      The anchor, accepted drafts and bonus token of each outcome, padded, int32
      [B·(K + 1)·F, K + 2], and the number of tokens after the anchor, int32 [B·(K + 1)·F].
    """
    size = bonus.shape[1] + 1
    block = jnp.pad(jnp.concatenate([anchor[:, None], drafts], axis=1), ((0, 0), (0, 1)))
    ends = jnp.arange(1, size)[:, None, None]
    tokens = jnp.where(jnp.arange(size) == ends, bonus[..., None], block[:, None, None])
    return tokens.reshape(-1, size), jnp.broadcast_to(ends[..., 0], bonus.shape).reshape(-1)


def observe_prompts(heads: Heads, drafter: Drafter, state: Any, rows: Rows, *, count: int) -> Any:
    """Returns the drafter's state after a chunk of each prompt, of at most `count` rows."""
    state = drafter.clear(state, (rows.num_committed > 0) & (rows.position == 0))
    return drafter.observe(state, *rows.first(count), heads)


def insert(
    heads: Heads, drafter: Drafter, drafting: DraftingState, prompts: Any, row, slot
) -> DraftingState:
    """Puts prompt `row` into a slot."""
    state = drafter.insert(drafting.drafter, prompts, row, slot)
    return dataclasses.replace(drafting, drafter=state)


def draft(
    heads: Heads, drafter: Drafter, drafting: DraftingState, anchors: Anchors
) -> DraftingState:
    """Drafts for all sequences from their states."""
    best = drafting.ranked.shape[-1]
    ranked, state = _draft(heads, drafter, drafting.drafter, anchors, best)
    return dataclasses.replace(drafting, drafter=state, ranked=ranked)


def advance(
    heads: Heads,
    drafter: Drafter,
    drafting: DraftingState,
    rows: Rows,
    anchors: Anchors,
    active: jax.Array,
    *,
    count: int,
) -> tuple[DraftingState, Mapping[str, jax.Array]]:
    """Takes in a verification, and proposes the next drafts.

    Drafts are those for the outcome if it was foreseen for every sequence that is `active`, bool
    [B]. Otherwise all sequences draft anew, which takes as long as for a single one.

    Args:
      rows: Committed rows, at most `count` of each sequence; none where the cycle did not run,
        which keeps the sequence's drafts.
    Returns:
      The state with the next drafts, and the counts of the cycle; see `Report.events`.
    """
    has_run, bonus = rows.num_committed > 0, guess(drafting.ranked)
    accepted = jnp.maximum(rows.num_committed - 1, 0)
    foreseen, ranked = look_up(bonus, drafting.ahead, accepted, anchors.tokens)
    drafting = dataclasses.replace(
        drafting,
        drafter=drafter.observe(drafting.drafter, *rows.first(count), heads),
        ranked=jnp.where(has_run[:, None, None], ranked, drafting.ranked),
    )
    looked_up = has_run & active
    missed = jnp.any(~foreseen & looked_up)
    # XLA may copy the caches at a branch; a loop of at most one turn updates them in place.
    _, drafting = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros_like(missed), draft(heads, drafter, carry[1], anchors)),
        (missed, drafting),
    )
    names = "speculation_lookups", "speculation_hits", "redrafted_cycles"
    numbers = looked_up.sum(), (foreseen & looked_up).sum(), missed
    return drafting, {name: jnp.int32(n)[None] for name, n in zip(names, numbers, strict=True)}


def speculate(
    heads: Heads,
    drafter: Drafter,
    drafting: DraftingState,
    rows: Rows,
    anchors: Anchors,
    *,
    forks: Copies,
) -> DraftingState:
    """Drafts for the likely outcomes of the verification of the present drafts."""
    drafts, bonus = drafting.ranked[:, :-1, 0], guess(drafting.ranked)
    tokens, num_committed = continuations(anchors.tokens, drafts, bonus)
    # The target has not computed the features of these tokens; those of the last row stand in.
    last = jnp.maximum(rows.num_committed - 1, 0)[:, None, None]
    features = jnp.take_along_axis(rows.features, last, axis=1)
    features = jnp.repeat(features, tokens.shape[1] - 1, axis=1)
    length, sampling, features = jax.tree.map(
        lambda x: jnp.repeat(x, forks.count, axis=0), (anchors.length, anchors.sampling, features)
    )
    forked = forks.open(drafting.drafter, anchors.length - 1)
    forked = drafter.observe(forked, length - 1, tokens, num_committed, features, heads)
    newest = jnp.take_along_axis(tokens, num_committed[:, None], axis=1)[:, 0]
    ends = Anchors(newest, length + num_committed, sampling)
    ahead, forked = _draft(heads, drafter, forked, ends, drafting.ranked.shape[-1])
    state = forks.close(drafting.drafter, forked)
    return DraftingState(state, drafting.ranked, ahead.reshape(drafting.ahead.shape))


def _draft(
    heads: Heads, drafter: Drafter, state: Any, anchors: Anchors, best: int
) -> tuple[jax.Array, Any]:
    """Drafts one token more than are verified; returns the ranked tokens and the state."""
    sampler = RankingSampler(anchors.sampling, count=best)
    proposal, state = drafter.draft(state, anchors.tokens, anchors.length - 1, sampler, heads)
    return proposal.probs, state
