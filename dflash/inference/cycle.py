"""One cycle: draft, verify, commit, observe. Pure functions that run on the device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Heads, Proposal
from dflash.inference import controls, logprobs, nonfinite, verify
from dflash.inference import tree as trees
from dflash.inference.logprobs import Logprobs
from dflash.inference.sampling import SequenceSampler
from dflash.inference.state import DecodeState
from dflash.models.decoder import Decoder

# Changes the result on a proposal: (drafter, its state after the draft, result) -> result.
Revise = Callable[[Drafter, Any, verify.VerifyResult], verify.VerifyResult]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is compiled into the loop; everything else belongs to the sequences.

    Attributes:
      block_sizes: rows that a cycle may verify of a sequence, ascending; the last is the drafter's.
      rejection: verify by rejection, not by coupling.
      revise: applied to every result. For measurements alone: the output is then meaningless, but
        the work is the same.
    """

    block_sizes: tuple[int, ...]
    rejection: bool = False
    revise: Revise | None = None


class Outcome(NamedTuple):
    """What a cycle committed.

    Attributes:
      tokens: int32 [B, longest path].
      count: int32 [B]; how many of them count.
      logprobs: of the tokens, where sequences want them.
      refused: int32 [B, drafts]; those that were not accepted, and -1 in place of the others.
    """

    tokens: jax.Array
    count: jax.Array
    logprobs: Logprobs
    refused: jax.Array


def cycle(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules, block_size: int
) -> tuple[DecodeState, Outcome]:
    """Advances every active slot by one draft and one target forward.

    Args:
      target: the model that verifies.
      drafter: the strategy that proposes.
      state: see its invariant.
      rules: what is compiled into the loop.
      block_size: rows to verify, at most the drafter's.
    """
    state, proposal = propose(target, drafter, state, rules=rules, block_size=block_size)
    return conclude(target, drafter, state, proposal, rules=rules)


def propose(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules, block_size: int
) -> tuple[DecodeState, Proposal]:
    """The first half of a cycle: a draft for every slot; see `cycle`."""
    sampler = SequenceSampler(state.sampling, with_probs=rules.rejection)
    with jax.named_scope("drafter"):
        proposal, drafter_state = _draft(drafter, block_size - 1, state, sampler, target)
    return dataclasses.replace(state, drafter=drafter_state), proposal


def conclude(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    proposal: Proposal,
    *,
    rules: Rules,
    allowed: jax.Array | None = None,
) -> tuple[DecodeState, Outcome]:
    """The second half of a cycle: verifies a proposal, commits, and lets the drafter observe.

    Args:
      state: as `propose` left it.
      proposal: what it returned.
      allowed: int32 [B, R, ceil(V / 32)] or None; which tokens may follow each row, see
        `controls.shape_logits`.
    """
    position = state.length - 1
    sampler = SequenceSampler(state.sampling, with_probs=rules.rejection)
    rows = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    tree = None
    if proposal.parents is not None:
        tree = trees.from_parents(proposal.parents, drafter.longest_path - 1)
    output, positions = _forward(target, drafter, state, rows, tree)
    logits = target.unembed(output.hidden)
    result, sound = _judge(state, proposal, tree, logits, positions + 1, sampler, allowed)
    drafter_state = state.drafter
    if result.sampled is not None:
        drafter_state = drafter.review(drafter_state, proposal, result.sampled)
    if rules.revise is not None:
        result = rules.revise(drafter, drafter_state, result)

    features, cache = output.features, output.cache
    committed = _following_tokens(rows, result)
    if result.path is not None:
        with jax.named_scope("target"), jax.named_scope("attention"):
            cache = cache.compact(position, result.path, target.sharding)
        features = jnp.take_along_axis(features, result.path[..., None], axis=1)
    sound = _along(result.path, sound)
    num_committed, active, nonfinite_at = _commit(state, committed, sound, result.num_accepted + 1)
    wanted = state.controls.logprobs & state.active
    outcome = Outcome(
        committed,
        num_committed,
        logprobs.of_tokens(logits, committed, wanted, result.path),
        _refused(proposal.tokens, result),
    )
    following = jnp.concatenate([state.anchor[:, None], committed], axis=1)
    adaptive = state.adaptive
    if adaptive is not None:
        adaptive = adaptive.learn(num_committed, state.limit - state.length, rules.block_sizes)
    if adaptive is not None and rows.shape[1] == 1:
        adaptive = adaptive.put_aside(following, num_committed, features)
    else:
        with jax.named_scope("drafter"):
            drafter_state = drafter.observe(
                drafter_state, position, following, num_committed, features, target
            )
    last = jnp.maximum(num_committed - 1, 0)[:, None]
    anchor = jnp.take_along_axis(committed, last, axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        length=state.length + num_committed,
        anchor=jnp.where(num_committed > 0, anchor, state.anchor),
        active=active,
        controls=state.controls.with_tokens(state.length, committed, num_committed),
        cache=cache,
        drafter=drafter_state,
        adaptive=adaptive,
        nonfinite_at=nonfinite_at,
    )
    return state, outcome


def _forward(target, drafter, state, rows, tree):
    """The target over the anchor and the drafts: its output, and the rows' positions."""
    depth = jnp.arange(rows.shape[1]) if tree is None else tree.depth
    positions = state.length[:, None] - 1 + depth
    with jax.named_scope("target"):
        output = target(
            rows,
            jnp.broadcast_to(positions, rows.shape),
            state.cache,
            feature_layers=drafter.feature_layers,
            tree_mask=None if tree is None else tree.ancestry,
        )
    return output, positions


def _draft(
    drafter: Drafter, count: int, state: DecodeState, sampler: SequenceSampler, heads: Heads
) -> tuple[Proposal, Any]:
    """A proposal of `count` tokens, and the drafter's state."""
    if count == drafter.num_draft_tokens:
        draft = drafter.draft
    elif count:
        draft = functools.partial(drafter.draft_fewer, count)
    else:
        return Proposal(jnp.zeros((state.anchor.shape[0], 0), jnp.int32)), state.drafter
    return draft(state.drafter, state.anchor, state.length - 1, sampler, heads)


def _judge(
    state: DecodeState,
    proposal: Proposal,
    tree: trees.Tree | None,
    logits: jax.Array,
    positions: jax.Array,
    sampler: SequenceSampler,
    allowed: jax.Array | None,
) -> tuple[verify.VerifyResult, jax.Array]:
    """The result on a proposal, and whether the logits of each row are finite, bool [B, R].

    Both follow from logits that were shaped as the sequences ask for; see `controls`.
    """
    ancestry = None if tree is None else tree.ancestry

    def judge(logits):
        result = _verify(proposal, tree, logits, positions, sampler)
        return result, _sound_rows(result, logits)

    def judge_shaped():
        shaped = controls.shape_logits(
            logits,
            state.controls,
            state.length,
            state.stop_ids,
            proposal.tokens,
            ancestry,
            allowed,
        )
        return judge(shaped)

    if allowed is not None:
        return judge_shaped()
    # Two copies of the rule, rather than one over a choice of logits, which would be copied.
    with jax.named_scope("if_shaped"):
        shapes = state.controls.shapes(state.length, state.active)
        return jax.lax.cond(shapes, judge_shaped, lambda: judge(logits))


def _verify(
    proposal: Proposal,
    tree: trees.Tree | None,
    logits: jax.Array,
    positions: jax.Array,
    sampler: SequenceSampler,
) -> verify.VerifyResult:
    """Applies the rule for the proposal's form: chain or tree, coupled or by rejection."""
    positions = jnp.broadcast_to(positions, logits.shape[:2])
    if proposal.probs is not None:
        return _reject(proposal, tree, logits, positions, sampler.params)
    if sampler.with_probs and proposal.tokens.shape[1]:
        raise ValueError("rejection verification of a proposal without probabilities")
    sampled = sampler.sample(logits, positions)
    if tree is None:
        return verify.coupled_chain(proposal.tokens, sampled)
    return verify.coupled_tree(proposal.tokens, sampled, tree)


def _reject(proposal, tree, logits, positions, params) -> verify.VerifyResult:
    """Rejection verification of a chain, or of a tree; see the rules."""
    tokens, probs = proposal.tokens, proposal.probs
    if tree is None:
        return verify.rejection_chain(tokens, probs, logits, positions, params)
    drawn_from = proposal.drawn_from
    if drawn_from is None:
        drawn_from = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return verify.rejection_tree(tokens, probs, drawn_from, logits, positions, params, tree)


def _following_tokens(rows: jax.Array, result: verify.VerifyResult) -> jax.Array:
    """The accepted drafts, then the bonus token: int32 [B, longest path].

    Of these num_accepted + 1 count.
    """
    along = _along(result.path, rows)
    following = jnp.roll(along, -1, axis=1)
    is_bonus = jnp.arange(along.shape[1]) == result.num_accepted[:, None]
    return jnp.where(is_bonus, result.next_token[:, None], following)


def _refused(drafts: jax.Array, result: verify.VerifyResult) -> jax.Array:
    """The drafts [B, G] that were not accepted, and -1 in place of the others."""
    batch, count = drafts.shape
    rows = jnp.arange(count + 1)[None] if result.path is None else result.path
    rows = jnp.broadcast_to(rows, (batch, rows.shape[1]))
    accepted = jnp.arange(rows.shape[1]) <= result.num_accepted[:, None]
    slots = jnp.arange(batch)[:, None]
    # Row 0 is the anchor. What lies past the accepted path goes nowhere.
    taken = jnp.zeros((batch, count + 1), bool)
    taken = taken.at[slots, jnp.where(accepted, rows, count + 1)].set(True, mode="drop")
    return jnp.where(taken[:, 1:], -1, drafts)


def _commit(
    state: DecodeState, committed: jax.Array, sound: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts the accepted tokens: at the limit, the first stop token, the first unsound row.

    Returns:
      num_committed int32 [B]; active bool [B] and nonfinite_at int32 [B] after the cycle.
    """
    count = jnp.minimum(count, state.limit - state.length)
    stops = jnp.any(committed[..., None] == state.stop_ids[:, None], axis=-1)
    stops &= jnp.arange(committed.shape[1]) < count[:, None]
    stopped = stops.any(axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.where(state.active, count, 0)
    active = state.active & ~stopped & (state.length + count < state.limit)
    wrong = ~sound & (jnp.arange(sound.shape[1]) < count[:, None])
    is_wrong = wrong.any(axis=1)
    first = jnp.argmax(wrong, axis=1).astype(jnp.int32)
    nonfinite_at = jnp.where(is_wrong, state.length + first, state.nonfinite_at)
    return jnp.where(is_wrong, first, count), active & (nonfinite_at == 0), nonfinite_at


def _along(path: jax.Array | None, rows: jax.Array) -> jax.Array:
    """What rows [B, R] have along the accepted path; of a chain all rows are on it."""
    return rows if path is None else jnp.take_along_axis(rows, path, axis=1)


def _sound_rows(result: verify.VerifyResult, logits: jax.Array) -> jax.Array:
    """Whether each row has finite logits: bool [B, R]."""
    picked = result.sampled
    if picked is None:  # probabilities take the same argmax, which the compiler finds out
        picked = jnp.argmax(logits, axis=-1)
    return nonfinite.finite_rows(logits, picked)
