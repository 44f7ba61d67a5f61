"""One cycle: draft, verify, commit, observe. Pure functions that run on the device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Heads, Proposal
from dflash.inference import broken, verify
from dflash.inference import tree as trees
from dflash.inference.sampling import SequenceSampler
from dflash.inference.state import DecodeState, Report
from dflash.models.decoder import Decoder

# Changes the verdict on a proposal: (drafter, its state after the draft, verdict) -> verdict.
Revise = Callable[[Drafter, Any, verify.Verdict], verify.Verdict]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is compiled into the loop; everything else belongs to the sequences.

    Attributes:
      block_sizes: rows that a cycle may verify of a sequence, ascending; the last is the drafter's.
      rejection: verify by rejection, not by coupling.
      revise: applied to every verdict. For measurements alone: the output is then meaningless, but
        the work is the same.
    """

    block_sizes: tuple[int, ...]
    rejection: bool = False
    revise: Revise | None = None


def cycle(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules, block_size: int
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Advances every active slot by one draft and one target forward.

    Args:
      target: the model that verifies.
      drafter: the strategy that proposes.
      state: see its invariant.
      rules: what is compiled into the loop.
      block_size: rows to verify, at most the drafter's.
    Returns:
      state, committed tokens int32 [B, longest path], num_committed int32 [B].
    """
    position = state.length - 1
    sampler = SequenceSampler(state.sampling, with_probs=rules.rejection)
    with jax.named_scope("drafter"):
        proposal, drafter_state = _draft(drafter, block_size - 1, state, sampler, target)

    rows = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    tree = None
    if proposal.parents is not None:
        tree = trees.from_parents(proposal.parents, drafter.longest_path - 1)
    output, positions = _forward(target, drafter, state, rows, tree)
    logits = target.unembed(output.hidden)
    verdict = _verify(proposal, tree, logits, positions + 1, sampler)
    if verdict.sampled is not None:
        drafter_state = drafter.review(drafter_state, proposal, verdict.sampled)
    if rules.revise is not None:
        verdict = rules.revise(drafter, drafter_state, verdict)

    features, cache = output.features, output.cache
    committed = _following_tokens(rows, verdict)
    if verdict.path is not None:
        cache = cache.compact(position, verdict.path, target.sharding)
        features = jnp.take_along_axis(features, verdict.path[..., None], axis=1)
    sound = _sound_rows(verdict, logits)
    num_committed, active, broken_at = _commit(state, committed, sound, verdict.num_accepted + 1)
    following = jnp.concatenate([state.anchor[:, None], committed], axis=1)
    adaptive = state.adaptive
    if adaptive is not None:
        adaptive = adaptive.learn(num_committed, state.limit - state.length, rules.block_sizes)
    if adaptive is not None and block_size == 1:
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
        cache=cache,
        drafter=drafter_state,
        adaptive=adaptive,
        broken_at=broken_at,
    )
    return state, committed, num_committed


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


def run_cycles(
    target: Decoder, drafter: Drafter, state: DecodeState, *, max_cycles: int, rules: Rules
) -> tuple[DecodeState, Report]:
    """Runs cycles until `max_cycles` are done or no slot is active; see `cycle`."""
    sizes = rules.block_sizes
    batch, rows = state.anchor.shape[0], drafter.longest_path
    report = Report(
        cycles=jnp.int32(0),
        tokens=jnp.zeros((max_cycles, batch, rows), jnp.int32),
        num_committed=jnp.zeros((max_cycles, batch), jnp.int32),
        active=state.active,
        block_sizes=jnp.zeros(max_cycles, jnp.int32),
        broken_at=state.broken_at,
    )

    def go_on(carry):
        _, report = carry
        return (report.cycles < max_cycles) & jnp.any(report.active)

    def step(size, carry):
        state, report = carry
        state, tokens, num_committed = cycle(target, drafter, state, rules=rules, block_size=size)
        i = report.cycles
        report = Report(
            cycles=i + 1,
            tokens=report.tokens.at[i, :, : tokens.shape[1]].set(tokens),
            num_committed=report.num_committed.at[i].set(num_committed),
            active=state.active,
            block_sizes=report.block_sizes.at[i].set(size),
            broken_at=state.broken_at,
        )
        return _choose(state, sizes), report

    steps = [functools.partial(step, size) for size in sizes]
    if state.adaptive is None:
        return jax.lax.while_loop(go_on, steps[0], (state, report))
    catch_up = functools.partial(_catch_up, target, drafter)
    return _loop_by_size(go_on, steps, catch_up, (_choose(state, sizes), report))


def _choose(state: DecodeState, sizes: tuple[int, ...]) -> DecodeState:
    """Chooses the next cycle's block size, where there is a choice."""
    if state.adaptive is None:
        return state
    chosen = state.adaptive.choose(state.active, state.limit - state.length, sizes)
    return dataclasses.replace(state, adaptive=chosen)


def _catch_up(target: Decoder, drafter: Drafter, carry):
    """Lets the drafter observe the backlog."""
    state, report = carry
    adaptive, position = state.adaptive, state.length - 1
    with jax.named_scope("drafter"):
        drafter_state, backlog = adaptive.backlog.clear(
            drafter, state.drafter, state.anchor, position, state.active, target
        )
    adaptive = dataclasses.replace(adaptive, backlog=backlog)
    return dataclasses.replace(state, drafter=drafter_state, adaptive=adaptive), report


def _loop_by_size(go_on, steps, catch_up, carry):
    """Runs the step of the chosen size while `go_on` holds.

    Each size has a loop of its own, which runs while that size is chosen, inside one loop over all
    sizes. A switch in a single loop would compute the same, but loops update the caches in place,
    while branches may copy them.
    """

    def must_clear(carry):
        state, _ = carry
        return state.adaptive.must_clear(state.active)

    def chosen(index, carry):
        state, _ = carry
        return go_on(carry) & ~must_clear(carry) & (state.adaptive.choice.index == index)

    def each_in_turn(carry):
        carry = jax.lax.while_loop(lambda c: go_on(c) & must_clear(c), catch_up, carry)
        for index, step in enumerate(steps):
            carry = jax.lax.while_loop(functools.partial(chosen, index), step, carry)
        return carry

    return jax.lax.while_loop(go_on, each_in_turn, carry)


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


def _verify(
    proposal: Proposal,
    tree: trees.Tree | None,
    logits: jax.Array,
    positions: jax.Array,
    sampler: SequenceSampler,
) -> verify.Verdict:
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


def _reject(proposal, tree, logits, positions, params) -> verify.Verdict:
    """Rejection verification of a chain, or of a tree; see the rules."""
    tokens, probs = proposal.tokens, proposal.probs
    if tree is None:
        return verify.rejection_chain(tokens, probs, logits, positions, params)
    drawn_from = proposal.drawn_from
    if drawn_from is None:
        drawn_from = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return verify.rejection_tree(tokens, probs, drawn_from, logits, positions, params, tree)


def _following_tokens(rows: jax.Array, verdict: verify.Verdict) -> jax.Array:
    """The accepted drafts, then the bonus token: int32 [B, longest path].

    Of these num_accepted + 1 count.
    """
    path = verdict.path
    along = rows if path is None else jnp.take_along_axis(rows, path, axis=1)
    following = jnp.roll(along, -1, axis=1)
    is_bonus = jnp.arange(along.shape[1]) == verdict.num_accepted[:, None]
    return jnp.where(is_bonus, verdict.next_token[:, None], following)


def _commit(
    state: DecodeState, committed: jax.Array, sound: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts the accepted tokens: at the limit, the first stop token, the first unsound row.

    Returns:
      num_committed int32 [B]; active bool [B] and broken_at int32 [B] after the cycle.
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
    broken_at = jnp.where(is_wrong, state.length + first, state.broken_at)
    return jnp.where(is_wrong, first, count), active & (broken_at == 0), broken_at


def _sound_rows(verdict: verify.Verdict, logits: jax.Array) -> jax.Array:
    """Whether each row of the accepted path has finite logits: bool [B, longest path]."""
    picked = verdict.sampled
    if picked is None:  # probabilities take the same argmax, which the compiler finds out
        picked = jnp.argmax(logits, axis=-1)
    sound = broken.finite_rows(logits, picked)
    return sound if verdict.path is None else jnp.take_along_axis(sound, verdict.path, axis=1)
