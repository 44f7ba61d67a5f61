"""Draft, verify, commit and observe steps of one decode cycle, as pure device functions."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Heads, Proposal
from dflash.inference.cycle import judge, verify
from dflash.inference.cycle import tree as trees
from dflash.inference.cycle.rules import Rules
from dflash.inference.cycle.state import DecodeState
from dflash.inference.logits import logprobs
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.logits.sampling import SequenceSampler
from dflash.models.decoder import Decoder


class Outcome(NamedTuple):
    """Tokens committed by one cycle.

    Attributes:
      tokens: int32 [B, longest path].
      count: int32 [B]; number of valid entries in each row of `tokens`.
      accepted: int32 [B]; number of accepted drafts among them: all, or all but the bonus token.
      logprobs: Log-probabilities of the tokens, zero where no sequence requests them.
      rejected: int32 [B, drafts]; rejected drafts, and -1 in place of others.
      rows: int32 [B]; number of rows that were verified.
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    logprobs: Logprobs
    rejected: jax.Array
    rows: jax.Array


def cycle(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    *,
    rules: Rules,
    block_size: int,
    mean_rows: int | None = None,
) -> tuple[DecodeState, Outcome]:
    """Advances every active slot by one draft and one target forward.

    Args:
      target: Model that verifies.
      drafter: Strategy that proposes.
      state: Decode state that satisfies the invariant of `DecodeState`.
      rules: Static settings of the loop.
      block_size: Rows to draft, anchor included, at most the drafter's block size.
      mean_rows: Mean number of rows per slot to verify, divided among the sequences; None to verify
        `block_size` rows of each.
    """
    divides, by_confidence = mean_rows is not None, rules.division.by_confidence
    sizes = block_size - 1, mean_rows
    rows = judge.divide(state, *sizes, rules) if divides and not by_confidence else None
    state, proposal = propose(target, drafter, state, rules=rules, block_size=block_size, rows=rows)
    if divides and by_confidence:
        rows = judge.divide(state, *sizes, rules, proposal.confidence)
    return conclude(target, drafter, state, proposal, rules=rules, rows=rows)


def propose(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    *,
    rules: Rules,
    block_size: int,
    rows: judge.Rows | None = None,
) -> tuple[DecodeState, Proposal]:
    """Drafts a block for every slot: the first half of `cycle`.

    Args:
      target: Model that verifies.
      drafter: Strategy that proposes.
      state: Decode state that satisfies the invariant of `DecodeState`.
      rules: Static settings of the loop.
      block_size: Rows to draft, anchor included.
      rows: Rows that will be verified, if they are divided and known. Drafts without a row may then
        be arbitrary.
    """
    if state.windows is not None and block_size > 1:
        windows = state.windows.choose(state.length)
        state = dataclasses.replace(state, windows=windows)
        drafter = drafter.within(windows.positions())
    sampler = rules.sampler(state)
    if rows is not None and not rules.lookup:  # A lookup compares all drafts with the output.
        sampler = dataclasses.replace(sampler, packing=rows.drafts)
    with jax.named_scope("drafter"):
        proposal, drafter_state = _draft(drafter, block_size - 1, state, sampler, target)
        lookup = state.lookup
        if lookup is not None and block_size > 1:
            token_ids, position = state.controls.token_ids, state.length - 1
            lookup, proposal = lookup.beside(proposal, token_ids, position)
    return dataclasses.replace(state, drafter=drafter_state, lookup=lookup), proposal


def conclude(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    proposal: Proposal,
    *,
    rules: Rules,
    allowed: jax.Array | None = None,
    rows: judge.Rows | None = None,
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
      rows: Rows that are verified, if they are divided among the sequences; None for all.
    """
    tokens = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    tree, num_drafts = _tree(proposal, drafter), proposal.tokens.shape[1]
    packing = None if rows is None else rows.packing
    output, positions = _forward(target, drafter, state, tokens, tree, packing)
    logits = target.unembed(output.hidden)
    result, finite = judge.judge(state, proposal, tree, logits, positions + 1, rules, allowed, rows)
    drafter_state, result = _review(drafter, state.drafter, proposal, result, rules, rows)
    committed = _following_tokens(tokens, result)
    num_committed, active, nonfinite_at = _commit(
        state, committed, _along(result.path, finite), result.num_accepted + 1
    )
    cache, features = _keep_path(
        target, output, state.length - 1, num_committed, result.path, packing
    )
    shape = functools.partial(judge.shape, state, proposal, tree, allowed)
    scores = _scores(state, result, committed, logits, shape, rules, rows)
    outcome = _outcome(state, proposal, result, committed, num_committed, scores, rows)
    state = dataclasses.replace(state, drafter=drafter_state)
    following = jnp.concatenate([state.anchor[:, None], committed], axis=1)
    adaptive = _learn(state, proposal, result, num_committed, rules, rows)
    drafter_state, adaptive = _observe(
        target, drafter, state, adaptive, following, num_committed, features
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
        lookup=state.lookup and state.lookup.learn(committed, num_committed, num_drafts),
        windows=_learn_windows(state, drafter, outcome, active, num_drafts),
        nonfinite_at=nonfinite_at,
    )
    return state, outcome


def _scores(state, result, committed, logits, shape, rules, rows) -> Logprobs:
    """Returns the log-probabilities of the committed tokens, where sequences request them."""
    if rules.greedy:
        return logprobs.zeros(committed.shape, logits.shape[-1])
    wanted = state.controls.logprobs & state.active
    packing = None if rows is None else rows.packing
    return logprobs.of_tokens(
        logits, shape, state.sampling, committed, wanted, result.path, packing
    )


def _outcome(state, proposal, result, committed, num_committed, scores, rows) -> Outcome:
    """Returns what a cycle reports."""
    drafts, counts = proposal.tokens, jnp.full_like(state.length, proposal.tokens.shape[1] + 1)
    if rows is not None:
        drafts, counts = rows.verified(drafts), rows.counts
    return Outcome(
        committed,
        num_committed,
        jnp.minimum(result.num_accepted, num_committed),
        scores,
        _rejected(drafts, result),
        counts,
    )


def _tree(proposal: Proposal, drafter: Drafter) -> trees.Tree | None:
    """Returns the tree of a proposal; None for a chain."""
    if proposal.parents is None:
        return None
    deepest = min(drafter.longest_path - 1, proposal.tokens.shape[1])
    return trees.from_parents(proposal.parents, deepest)


def _review(
    drafter: Drafter,
    drafter_state: Any,
    proposal: Proposal,
    result: verify.VerifyResult,
    rules: Rules,
    rows: judge.Rows | None,
) -> tuple[Any, verify.VerifyResult]:
    """Shows the target's samples to the drafter, and applies `rules.revise` to the result."""
    if result.sampled is not None:
        drafter_state = drafter.review(drafter_state, proposal, result.sampled)
    if rules.revise is not None:
        result = rules.revise(drafter, drafter_state, result)
        if rows is not None:
            most = jnp.maximum(rows.counts - 1, 0)
            result = verify.force(result, jnp.minimum(result.num_accepted, most))
    return drafter_state, result


def _keep_path(target, output, position, num_committed, path, packing):
    """Returns the cache and the features of the accepted path; a chain keeps all of its rows."""
    with jax.named_scope("target"), jax.named_scope("attention"):
        cache = output.cache.commit(position, num_committed, path, target.sharding)
    features = output.features if packing is None else packing.unpack(output.features)
    return cache, features if path is None else _along(path[..., None], features)


def _learn(state, proposal, result, num_committed, rules, rows):
    """Returns the state that chooses block sizes, with what was accepted; None without one."""
    if state.adaptive is None:
        return None
    sizes, num_drafts = (rules.block_sizes, rules.division), proposal.tokens.shape[1]
    if not num_drafts:
        return state.adaptive.earn(state.active)
    left = state.limit - state.length
    counts = confidence = on_path = None
    if rows is not None:
        counts = rows.counts
        confidence = proposal.confidence if rules.division.by_confidence else None
    if result.path is not None:
        # The bonus token is committed last, unless the output ended before it.
        on_path = _on_path(result, jnp.maximum(num_committed - 1, 0), num_drafts)
    return state.adaptive.learn(num_committed, left, *sizes, counts, on_path, confidence)


def _learn_windows(state, drafter, outcome, active, num_drafts):
    """Returns the state that chooses windows, with what was accepted; None without one."""
    if state.windows is None or not num_drafts:
        return state.windows
    # Where an output ends tells nothing about its drafts.
    verified = jnp.where(active, jnp.minimum(outcome.rows, drafter.longest_path) - 1, 0)
    if state.lookup is not None:
        verified = jnp.where(state.lookup.copies, 0, verified)
    return state.windows.learn(state.length, outcome.accepted, verified)


def _observe(target, drafter, state, adaptive, following, num_committed, features):
    """Lets the drafter observe the committed rows, or defers them to the backlog.

    Returns:
      The drafter's state and the state that chooses block sizes, both after the cycle.
    """
    drafter_state = state.drafter
    if adaptive is not None and features.shape[1] == 1:
        return drafter_state, adaptive.put_aside(following, num_committed, features)
    with jax.named_scope("drafter"):
        drafter_state = drafter.observe(
            drafter_state, state.length - 1, following, num_committed, features, target
        )
    return drafter_state, adaptive


def _forward(target, drafter, state, tokens, tree, packing):
    """Runs the target over the anchor and the drafts; returns its output and the row positions."""
    depth = jnp.arange(tokens.shape[1]) if tree is None else tree.depth
    positions = state.length[:, None] - 1 + depth
    with jax.named_scope("target"):
        output = target(
            tokens,
            jnp.broadcast_to(positions, tokens.shape),
            state.cache,
            feature_layers=drafter.feature_layers,
            tree_mask=None if tree is None else tree.ancestry,
            packing=packing,
            adapters=state.adapter,
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
    accepted = _on_path(result, result.num_accepted, drafts.shape[1])
    return jnp.where(accepted, -1, drafts)


def _on_path(result: verify.VerifyResult, num_accepted: jax.Array, count: int) -> jax.Array:
    """Returns which of `count` drafts are the first ones of the accepted path, bool [B, count]."""
    batch = num_accepted.shape[0]
    rows = jnp.arange(count + 1)[None] if result.path is None else result.path
    rows = jnp.broadcast_to(rows, (batch, rows.shape[1]))
    accepted = jnp.arange(rows.shape[1]) <= num_accepted[:, None]
    slots = jnp.arange(batch)[:, None]
    # Row 0 is the anchor. Entries past the accepted path get an index that the scatter drops.
    taken = jnp.zeros((batch, count + 1), bool)
    taken = taken.at[slots, jnp.where(accepted, rows, count + 1)].set(True, mode="drop")
    return taken[:, 1:]


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
