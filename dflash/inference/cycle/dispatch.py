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
    most, waiting = max_cycles - state.concluded, state.active & state.controls.constrained
    state = dataclasses.replace(state, active=state.active & ~waiting)
    report = _empty_report(target, drafter, state, max_cycles, rules.block_sizes[-1])
    num_active = state.active.sum()

    def go_on(carry):
        _, report = carry
        cycles_left, now_active = most - report.cycles, report.active.sum()
        idle = (num_active - now_active) * cycles_left
        return (cycles_left > 0) & (now_active > 0) & (idle <= max_idle)

    def step(size, mean_rows, carry):
        state, report = carry
        state, outcome = cycles.cycle(
            target, drafter, state, rules=rules, block_size=size, mean_rows=mean_rows
        )
        if size > 1:  # A plain cycle tells nothing new.
            state = _choose(state, rules)
        return state, _record(report, state, outcome)

    def exact_step(carry):
        state, report = carry
        state, outcome = cycles.exact_cycle(target, drafter, state, rules=rules)
        return _choose(state, rules), _record(report, state, outcome)

    def catch_up(carry):
        state, report = carry
        return _catch_up(target, drafter, state), report

    steps = [functools.partial(step, *rules.choices.rows_of(i)) for i in range(len(rules.choices))]
    if rules.choices.exact and len(steps) > 1:  # One program for all, which is always observed.
        steps = [exact_step]
    state, report = _loop(go_on, [*steps, catch_up], (_choose(state, rules), report))
    state = dataclasses.replace(
        state, active=state.active | waiting, concluded=jnp.zeros_like(state.concluded)
    )
    return state, dataclasses.replace(report, active=state.active)


def propose(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules
) -> tuple[DecodeState, Proposal]:
    """Drafts the largest block for every slot, for `conclude` to verify."""
    state = _catch_up(target, drafter, _choose(state, rules))
    state = dataclasses.replace(state, choice=state.choice.largest())
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
      state: State returned by `propose`.
      proposal: Proposal returned by `propose`.
      allowed: int32 [B, R, ceil(V / 32)]; all ones for unconstrained sequences.
      ready: bool [B]; constrained sequences whose masks are valid. Other constrained ones wait.
    """
    waiting = state.active & state.controls.constrained & ~ready
    state = dataclasses.replace(state, active=state.active & ~waiting)
    report = _empty_report(target, drafter, state, 1, rules.block_sizes[-1])
    block = cycles.block_of(drafter, state, proposal)
    after, outcome = cycles.conclude(target, drafter, state, block, rules=rules, allowed=allowed)
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
            lambda all, row: all.at[i, :, :length].set(row), report.logprobs, outcome.logprobs
        ),
        rejected=report.rejected.at[i, :, : outcome.rejected.shape[1]].set(outcome.rejected),
    )


def _choose(state: DecodeState, rules: Rules) -> DecodeState:
    """Chooses the rows of the next cycle."""
    choice = state.choice.choose(state.active, rules.room(state))
    return dataclasses.replace(state, choice=choice)


def _catch_up(target: Decoder, drafter: Drafter, state: DecodeState) -> DecodeState:
    """Lets the drafter observe the rows that were put aside."""
    sequences = state.anchor, state.length - 1, state.active
    drafter_state, choice = state.choice.catch_up(drafter, state.drafter, *sequences, heads=target)
    return dataclasses.replace(state, drafter=drafter_state, choice=choice)


def _loop(go_on, steps, carry):
    """Runs the step that the state chooses while `go_on` holds.

    Each step has an inner loop of its own, which runs while it is chosen; an outer loop iterates
    over them. A single loop with a switch would compute the same, but XLA may copy the caches at a
    branch, since each branch returns them anew, whereas a loop updates its carry in place.

    Args:
      go_on: Function carry -> bool [].
      steps: Functions carry -> carry: a cycle of each choice of rows, and `_catch_up`.
      carry: State and report.
    """
    if len(steps) == 2:  # A single choice never falls behind.
        return jax.lax.while_loop(go_on, steps[0], carry)

    def chosen(index, carry):
        state, _ = carry
        return go_on(carry) & (state.choice.step(state.active) == index)

    def each_in_turn(carry):
        for index, step in enumerate(steps):
            carry = jax.lax.while_loop(functools.partial(chosen, index), step, carry)
        return carry

    return jax.lax.while_loop(go_on, each_in_turn, carry)
