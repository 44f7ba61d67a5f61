"""Draft, verify, commit and observe steps of one decode cycle, as pure device functions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Heads, Proposal
from dflash.inference.cycle import tree as trees
from dflash.inference.cycle import verify
from dflash.inference.cycle.state import DecodeState
from dflash.inference.logits import controls, logprobs, nonfinite
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.logits.sampling import SequenceSampler
from dflash.models.decoder import Decoder

# Changes the result on a proposal: (drafter, its state after the draft, result) -> result.
Revise = Callable[[Drafter, Any, verify.VerifyResult], verify.VerifyResult]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Static settings of the decode loop; all other settings are per-sequence device state.

    Attributes:
      block_sizes: Numbers of rows that a cycle may verify per sequence, ascending; the last one is
        the drafter's block size.
      verify: Rule that accepts drafts; see `verify`.
      revise: Function applied to every `VerifyResult`, for measurements only: the output becomes
        meaningless, but the work stays the same.
    """

    block_sizes: tuple[int, ...]
    verify: Literal["coupled", "rejection", "block"] = "coupled"
    revise: Revise | None = None

    def sampler(self, state: DecodeState) -> SequenceSampler:
        """Returns the sampler that drafts and verifies the next block of every sequence."""
        params = state.sampling
        if self.verify == "block":
            params = params.of_block(state.length)
        return SequenceSampler(params, with_probs=self.verify != "coupled")


class Outcome(NamedTuple):
    """Tokens committed by one cycle.

    Attributes:
      tokens: int32 [B, longest path].
      count: int32 [B]; number of valid entries in each row of `tokens`.
      accepted: int32 [B]; number of accepted drafts among them: all, or all but the bonus token.
      logprobs: Log-probabilities of the tokens, zero where no sequence requests them.
      rejected: int32 [B, drafts]; rejected drafts, and -1 in place of accepted ones.
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    logprobs: Logprobs
    rejected: jax.Array


def cycle(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules, block_size: int
) -> tuple[DecodeState, Outcome]:
    """Advances every active slot by one draft and one target forward.

    Args:
      target: Model that verifies.
      drafter: Strategy that proposes.
      state: Decode state that satisfies the invariant of `DecodeState`.
      rules: Static settings of the loop.
      block_size: Rows to verify, at most the drafter's block size.
    """
    state, proposal = propose(target, drafter, state, rules=rules, block_size=block_size)
    return conclude(target, drafter, state, proposal, rules=rules)


def propose(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules, block_size: int
) -> tuple[DecodeState, Proposal]:
    """Drafts a block for every slot: the first half of `cycle`."""
    sampler = rules.sampler(state)
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
    """Verifies a proposal, commits, and lets the drafter observe: the second half of `cycle`.

    Args:
      target: Model that verifies.
      drafter: Strategy that proposed.
      state: State returned by `propose`.
      proposal: Proposal returned by `propose`.
      rules: Static settings of the loop.
      allowed: int32 [B, R, ceil(V / 32)] or None; bit mask of the tokens that may follow each row,
        see `controls.shape_logits`.
    """
    rows = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    tree = _tree(proposal, drafter)
    output, positions = _forward(target, drafter, state, rows, tree)
    logits = target.unembed(output.hidden)
    result, finite = _judge(state, proposal, tree, logits, positions + 1, rules, allowed)
    drafter_state, result = _review(drafter, state.drafter, proposal, result, rules)
    committed = _following_tokens(rows, result)
    num_committed, active, nonfinite_at = _commit(
        state, committed, _along(result.path, finite), result.num_accepted + 1
    )
    cache, features = _keep_path(target, output, state.length - 1, num_committed, result.path)
    with_logprobs = state.controls.logprobs & state.active
    outcome = Outcome(
        committed,
        num_committed,
        jnp.minimum(result.num_accepted, num_committed),
        logprobs.of_tokens(logits, committed, with_logprobs, result.path),
        _rejected(proposal.tokens, result),
    )
    state = dataclasses.replace(state, drafter=drafter_state)
    following = jnp.concatenate([state.anchor[:, None], committed], axis=1)
    drafter_state, adaptive = _observe(
        target, drafter, state, following, num_committed, features, rules
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


def _tree(proposal: Proposal, drafter: Drafter) -> trees.Tree | None:
    """Returns the tree of a proposal; None for a chain."""
    if proposal.parents is None:
        return None
    return trees.from_parents(proposal.parents, drafter.longest_path - 1)


def _review(
    drafter: Drafter,
    drafter_state: Any,
    proposal: Proposal,
    result: verify.VerifyResult,
    rules: Rules,
) -> tuple[Any, verify.VerifyResult]:
    """Shows the target's samples to the drafter, and applies `rules.revise` to the result."""
    if result.sampled is not None:
        drafter_state = drafter.review(drafter_state, proposal, result.sampled)
    if rules.revise is not None:
        result = rules.revise(drafter, drafter_state, result)
    return drafter_state, result


def _keep_path(target, output, position, num_committed, path):
    """Returns the cache and the features of the accepted path; a chain keeps all of its rows."""
    with jax.named_scope("target"), jax.named_scope("attention"):
        cache = output.cache.commit(position, num_committed, path, target.sharding)
    features = output.features
    return cache, features if path is None else _along(path[..., None], features)


def _observe(target, drafter, state, following, num_committed, features, rules):
    """Lets the drafter observe the committed rows, or defers them to the backlog.

    Returns:
      The drafter's state and the state that chooses block sizes, both after the cycle.
    """
    drafter_state, adaptive = state.drafter, state.adaptive
    if adaptive is not None:
        adaptive = adaptive.learn(num_committed, state.limit - state.length, rules.block_sizes)
    if adaptive is not None and features.shape[1] == 1:
        return drafter_state, adaptive.put_aside(following, num_committed, features)
    with jax.named_scope("drafter"):
        drafter_state = drafter.observe(
            drafter_state, state.length - 1, following, num_committed, features, target
        )
    return drafter_state, adaptive


def _forward(target, drafter, state, rows, tree):
    """Runs the target over the anchor and the drafts; returns its output and the row positions."""
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
    """Drafts `count` tokens per sequence; returns the proposal and the drafter's new state."""
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
    rules: Rules,
    allowed: jax.Array | None,
) -> tuple[verify.VerifyResult, jax.Array]:
    """Verifies a proposal and checks each row for finite logits.

    The logits are first shaped by the sequences' controls; see `controls`.

    Returns:
      The result of verification, and a mask of rows with finite logits, bool [B, R].
    """
    ancestry = None if tree is None else tree.ancestry
    sampler = rules.sampler(state)

    def judge(logits):
        result = _verify(proposal, tree, logits, positions, sampler, rules)
        return result, _finite_rows(result, logits)

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
    # Trace the rule in each branch: selecting the logits first would copy them.
    with jax.named_scope("if_shaped"):
        shapes = state.controls.shapes(state.length, state.active)
        return jax.lax.cond(shapes, judge_shaped, lambda: judge(logits))


def _verify(
    proposal: Proposal,
    tree: trees.Tree | None,
    logits: jax.Array,
    positions: jax.Array,
    sampler: SequenceSampler,
    rules: Rules,
) -> verify.VerifyResult:
    """Applies the rule of `rules` for the form of the proposal: chain or tree."""
    positions = jnp.broadcast_to(positions, logits.shape[:2])
    if proposal.probs is not None:
        return _reject(proposal, tree, logits, positions, sampler.params, rules)
    if sampler.with_probs and proposal.tokens.shape[1]:
        raise ValueError("rejection verification of a proposal without probabilities")
    sampled = sampler.sample(logits, positions)
    if tree is None:
        return verify.coupled_chain(proposal.tokens, sampled)
    return verify.coupled_tree(proposal.tokens, sampled, tree)


def _reject(proposal, tree, logits, positions, params, rules) -> verify.VerifyResult:
    """Verifies a chain or a tree by the probabilities of its drafts."""
    tokens, probs = proposal.tokens, proposal.probs
    if tree is None:
        rule = verify.block_chain if rules.verify == "block" else verify.rejection_chain
        return rule(tokens, probs, logits, positions, params)
    drawn_from = proposal.drawn_from
    if drawn_from is None:
        drawn_from = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return verify.rejection_tree(tokens, probs, drawn_from, logits, positions, params, tree)


def _following_tokens(rows: jax.Array, result: verify.VerifyResult) -> jax.Array:
    """Returns the accepted drafts followed by the bonus token, int32 [B, longest path].

    Only the first num_accepted + 1 entries are valid.
    """
    along = _along(result.path, rows)
    following = jnp.roll(along, -1, axis=1)
    is_bonus = jnp.arange(along.shape[1]) == result.num_accepted[:, None]
    return jnp.where(is_bonus, result.next_token[:, None], following)


def _rejected(drafts: jax.Array, result: verify.VerifyResult) -> jax.Array:
    """Returns the rejected drafts [B, G], with -1 in place of accepted ones."""
    batch, count = drafts.shape
    rows = jnp.arange(count + 1)[None] if result.path is None else result.path
    rows = jnp.broadcast_to(rows, (batch, rows.shape[1]))
    accepted = jnp.arange(rows.shape[1]) <= result.num_accepted[:, None]
    slots = jnp.arange(batch)[:, None]
    # Row 0 is the anchor. Entries past the accepted path get an index that the scatter drops.
    taken = jnp.zeros((batch, count + 1), bool)
    taken = taken.at[slots, jnp.where(accepted, rows, count + 1)].set(True, mode="drop")
    return jnp.where(taken[:, 1:], -1, drafts)


def _commit(
    state: DecodeState, committed: jax.Array, finite: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Truncates the accepted tokens at the limit, the first stop token, or a non-finite row.

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
    nonfinite_rows = ~finite & (jnp.arange(finite.shape[1]) < count[:, None])
    has_nonfinite = nonfinite_rows.any(axis=1)
    first = jnp.argmax(nonfinite_rows, axis=1).astype(jnp.int32)
    nonfinite_at = jnp.where(has_nonfinite, state.length + first, state.nonfinite_at)
    return jnp.where(has_nonfinite, first, count), active & (nonfinite_at == 0), nonfinite_at


def _along(path: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Gathers rows [B, R] along the accepted path; a chain keeps all of its rows."""
    return rows if path is None else jnp.take_along_axis(rows, path, axis=1)


def _finite_rows(result: verify.VerifyResult, logits: jax.Array) -> jax.Array:
    """Returns a mask of the rows with finite logits, bool [B, R]."""
    picked = result.sampled
    if picked is None:
        # `sampling.probabilities` takes the same argmax, so XLA computes it only once.
        picked = jnp.argmax(logits, axis=-1)
    return nonfinite.finite_rows(logits, picked)
