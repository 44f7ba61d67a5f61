"""Dispatch of several decode cycles as one loop on the device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal
from dflash.inference.cycle import cycle as cycles
from dflash.inference.cycle.cycle import Outcome
from dflash.inference.cycle.rules import Rules
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.logits import logprobs
from dflash.models.decoder import Decoder

ANY = 2**31 - 1  # However many cycles slots are idle.


def run_cycles(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    *,
    max_cycles: int,
    rules: Rules,
    max_idle: jax.Array | int = ANY,
) -> tuple[DecodeState, Report]:
    """Runs cycles until `max_cycles` are done or no slot is active; see `cycle.cycle`.

    It ends earlier if the slots whose sequences have ended would be idle for more than `max_idle`
    cycles together, so that other sequences may take them.

    A preceding cycle of `conclude` counts towards `max_cycles`. Constrained sequences wait, because
    their tokens depend on masks that only `conclude` receives.
    """
    largest, most = rules.block_sizes[-1], max_cycles - state.concluded
    waiting = state.active & state.controls.constrained
    state = dataclasses.replace(state, active=state.active & ~waiting)
    report = _empty_report(target, drafter, state, max_cycles, largest)

    num_active = state.active.sum()

    def go_on(carry):
        _, report = carry
        left, now_active = most - report.cycles, report.active.sum()
        idle = (num_active - now_active) * left
        return (left > 0) & (now_active > 0) & (idle <= max_idle)

    def step(size, mean_rows, carry):
        state, report = carry
        state, outcome = cycles.cycle(
            target, drafter, state, rules=rules, block_size=size, mean_rows=mean_rows
        )
        if size > 1:  # A plain cycle has already chosen what follows it.
            state = _choose(state, rules)
        return state, _record(report, state, outcome)

    steps = [functools.partial(step, *rules.rows_of(i)) for i in range(rules.num_choices)]
    if state.adaptive is None:
        state, report = jax.lax.while_loop(go_on, steps[0], (state, report))
    else:
        catch_up = functools.partial(_catch_up, target, drafter)
        carry = _choose(state, rules), report
        state, report = _loop_by_size(go_on, steps, catch_up, carry)
    state = dataclasses.replace(
        state, active=state.active | waiting, concluded=jnp.zeros_like(state.concluded)
    )
    return state, dataclasses.replace(report, active=state.active)


def propose(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules
) -> tuple[DecodeState, Proposal]:
    """Drafts the largest block for every slot, for `conclude` to verify."""
    if state.adaptive is not None:
        state, _ = _catch_up(target, drafter, (_choose(state, rules), None))
        last = len(rules.block_sizes) - 1
        state = dataclasses.replace(state, adaptive=state.adaptive.at(last))
    return cycles.propose(target, drafter, state, rules=rules, block_size=rules.block_sizes[-1])


def conclude(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    proposal: Proposal,
    allowed: jax.Array,
    ready: jax.Array,
    *,
    rules: Rules,
) -> tuple[DecodeState, Report]:
    """Verifies a proposal under masks, as the first cycle of a dispatch; see `cycle.conclude`.

    `run_cycles` runs the remaining cycles.

    Args:
      target: Model that verifies.
      drafter: Strategy that proposed.
      state: State returned by `propose`.
      proposal: Proposal returned by `propose`.
      allowed: int32 [B, R, ceil(V / 32)]; all ones for unconstrained sequences.
      ready: bool [B]; constrained sequences whose masks are valid. Other constrained ones wait.
      rules: Static settings of the loop.
    """
    waiting = state.active & state.controls.constrained & ~ready
    state = dataclasses.replace(state, active=state.active & ~waiting)
    report = _empty_report(target, drafter, state, 1, rules.block_sizes[-1])
    after, outcome = cycles.conclude(target, drafter, state, proposal, rules=rules, allowed=allowed)
    after = dataclasses.replace(
        after, active=after.active | waiting, concluded=jnp.ones_like(after.concluded)
    )
    return after, _record(report, after, outcome)


def _empty_report(
    target: Decoder, drafter: Drafter, state: DecodeState, max_cycles: int, rows: int
) -> Report:
    shape = max_cycles, state.anchor.shape[0], drafter.longest_path
    return Report(
        cycles=jnp.int32(0),
        tokens=jnp.zeros(shape, jnp.int32),
        num_committed=jnp.zeros(shape[:2], jnp.int32),
        num_accepted=jnp.zeros(shape[:2], jnp.int32),
        active=state.active,
        block_sizes=jnp.zeros(shape[:2], jnp.int32),
        nonfinite_at=state.nonfinite_at,
        logprobs=logprobs.zeros(shape, target.arch.vocab_size),
        rejected=jnp.full((*shape[:2], rows - 1), -1, jnp.int32),
    )


def _record(report: Report, state: DecodeState, outcome: Outcome) -> Report:
    """Appends a cycle; `state` is the state after it."""
    i, length = report.cycles, outcome.tokens.shape[1]
    return Report(
        cycles=i + 1,
        tokens=report.tokens.at[i, :, :length].set(outcome.tokens),
        num_committed=report.num_committed.at[i].set(outcome.count),
        num_accepted=report.num_accepted.at[i].set(outcome.accepted),
        active=state.active,
        block_sizes=report.block_sizes.at[i].set(outcome.rows),
        nonfinite_at=state.nonfinite_at,
        logprobs=jax.tree.map(
            lambda all, one: all.at[i, :, :length].set(one), report.logprobs, outcome.logprobs
        ),
        rejected=report.rejected.at[i, :, : outcome.rejected.shape[1]].set(outcome.rejected),
    )


def _choose(state: DecodeState, rules: Rules) -> DecodeState:
    """Chooses the block size of the next cycle if there are several."""
    if state.adaptive is None:
        return state
    sizes, division = rules.block_sizes, rules.division
    chosen = state.adaptive.choose(state.active, rules.left(state), sizes, division)
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
    """Runs the step of the chosen size or division while `go_on` holds.

    Each of them has its own inner loop, which runs while it is chosen; an outer loop iterates over
    them. A single loop with a switch would compute the same, but XLA may copy the caches
    at a branch, whereas a loop updates them in place.
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
