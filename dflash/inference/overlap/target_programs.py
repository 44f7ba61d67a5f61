"""Programs of overlapped decoding on the target's devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Proposal
from dflash.inference import batch_buckets, program_arguments, program_table
from dflash.inference.cycle import dispatch
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.overlap.overlap import Overlap
from dflash.inference.overlap.relay import Exchange, Mail, Relay
from dflash.inference.prefill import prefill_chunk
from dflash.inference.program_table import Program
from dflash.inference.shapes import Shapes, places
from dflash.models.decoder import Decoder
from dflash.parallel.sharding import zeros


def abstract_mail(shapes: Shapes, batch: int, rows: int, place: Callable[..., Any]) -> Mail:
    """Returns abstract mail; `place` makes (shape, dtype) an array."""
    relay, arch = shapes.drafter, shapes.target.arch
    width = len(relay.feature_layers) * arch.hidden_size
    return relay.mail(batch, rows, width, shapes.target.dtype, place)


class GroupedCycles:
    """Cycles of one group of slots at a time, with drafts from elsewhere."""

    def __init__(self, shapes: Shapes, groups: int):
        """Derives the shapes of a group and of a report."""
        self.shapes, self.groups = shapes, groups
        self.replicas = shapes.layout.num_replicas
        self.part = shapes.state(shapes.layout.slots_per_replica // groups)
        self.batch = shapes.layout.batch_size // groups

    def verify(
        self,
        target: Decoder,
        relay: Relay,
        state: DecodeState,
        report: Report,
        proposal: Proposal,
        group: jax.Array,
    ) -> tuple[DecodeState, Report, Mail, jax.Array]:
        """Runs one cycle of a group.

        Returns:
          The state; the report, with the group's results; rows for the drafter to observe; and the
          sequences of the group that go on, bool [B].
        """
        one = batch_buckets.take(state, self.part, self.replicas, group)
        one = dataclasses.replace(one, drafter=Exchange(proposal, self._no_mail()))
        one, own = dispatch.run_cycles(target, relay, one, max_cycles=1, rules=self.shapes.rules)
        mail, one = one.drafter.mail, dataclasses.replace(one, drafter=())
        cycles = jnp.maximum(report.cycles, own.cycles)
        state, report = batch_buckets.put((state, report), (one, own), self.replicas, group)
        return state, dataclasses.replace(report, cycles=cycles), mail, one.active

    def conclude(self, target, relay, state, proposal, allowed, ready):
        """Verifies the proposal of all slots under masks; see `dispatch.conclude`.

        Returns:
          The state; the report; and rows and active sequences, as `verify` does, by group.
        """
        batch = self.batch * self.groups
        mail = zeros(abstract_mail(self.shapes, batch, relay.longest_path, self.shapes.whole))
        state = dataclasses.replace(state, drafter=Exchange(proposal, mail))
        state, report = dispatch.conclude(
            target, relay, state, proposal, allowed, ready, rules=self.shapes.rules
        )
        own, like = (state.drafter.mail, state.active), (self._no_mail(), self.part.active)
        own = tuple(batch_buckets.take(own, like, self.replicas, i) for i in range(self.groups))
        return dataclasses.replace(state, drafter=()), report, own

    def whole(self, *proposals: Proposal) -> Proposal:
        """Returns the proposal of all slots from those of the groups."""
        relay, batch = self.shapes.drafter, self.batch * self.groups
        joined = zeros(relay.proposal(batch, self.shapes.whole))
        for i, proposal in enumerate(proposals):
            joined = batch_buckets.put(joined, proposal, self.replicas, i)
        return joined

    def report(self) -> Report:
        """Returns the abstract report of one cycle."""
        state = self.shapes.state()
        relay, whole = self.shapes.drafter, self.shapes.whole
        batch = self.batch * self.groups
        mail = abstract_mail(self.shapes, batch, relay.longest_path, whole)
        state = dataclasses.replace(state, drafter=Exchange(relay.proposal(batch, whole), mail))

        def run(target, relay, state):
            rules = self.shapes.rules
            return dispatch.run_cycles(target, relay, state, max_cycles=1, rules=rules)[1]

        report = jax.eval_shape(self.shapes.over_models(run), *self.shapes.weights, state)
        return jax.tree.map(lambda x: whole(x.shape, x.dtype), report)

    def proposals(self) -> tuple[Proposal, ...]:
        """Returns the abstract proposal of every group."""
        relay, whole = self.shapes.drafter, self.shapes.whole
        return (relay.proposal(self.batch, whole),) * self.groups

    def _no_mail(self) -> Mail:
        rows = self.shapes.drafter.longest_path
        return zeros(abstract_mail(self.shapes, self.batch, rows, self.shapes.whole))


def join_reports(reports: Sequence[Report]) -> Report:
    """Returns the report of a dispatch from those of single cycles, some of which did not run."""
    ran = jnp.stack([one.cycles for one in reports])
    order = jnp.argsort(ran == 0, stable=True)
    rows = jax.tree.map(
        lambda *parts: jnp.concatenate(parts)[order], *(one.by_cycle() for one in reports)
    )
    return dataclasses.replace(reports[-1], cycles=ran.sum(dtype=jnp.int32), **rows)


def _prefill(target, relay, cache, chunk, constraints, sampling):
    return prefill_chunk(target, relay, cache, (), chunk, sampling.with_keys(), constraints)


def _prefill_arguments(shapes: Shapes, rows: int) -> tuple:
    target, relay, cache, _, *prompts = program_arguments.prefill(shapes, rows)
    return target, relay, cache, *prompts


def _cycle_results(shapes: Shapes, count: int) -> tuple:
    return places(shapes.state()), *(shapes.replicated,) * count


def target_table(overlap: Overlap) -> dict[str, Program]:
    """Returns the programs of the target's devices; a relay is their drafter."""

    def cycles(shapes: Shapes) -> GroupedCycles:
        return GroupedCycles(shapes, overlap.groups)

    def report(shapes: Shapes) -> Report:
        one = cycles(shapes).report()
        foreseen = shapes.whole(one.num_committed.shape) if overlap.fan_out else None
        return dataclasses.replace(one, foreseen=foreseen)

    return program_table.TABLE | {
        "generate": Program(
            lambda shapes: shapes.over_models(cycles(shapes).verify),
            lambda shapes: (
                *shapes.weights, shapes.state(), cycles(shapes).report(),
                cycles(shapes).proposals()[0], shapes.scalar(),
            ),
            lambda shapes: _cycle_results(shapes, 3),
            donated=(2,),
            loops=True,
        ),
        "new_report": Program(
            lambda shapes: lambda: zeros(cycles(shapes).report()),
            lambda shapes: (),
            lambda shapes: shapes.replicated,
        ),
        "join_reports": Program(
            lambda shapes: join_reports,
            lambda shapes: ([report(shapes)] * shapes.config.sync_every,),
            lambda shapes: shapes.replicated,
        ),
        "draft": Program(
            lambda shapes: cycles(shapes).whole,
            lambda shapes: cycles(shapes).proposals(),
            lambda shapes: shapes.replicated,
        ),
        "conclude": Program(
            lambda shapes: shapes.over_models(cycles(shapes).conclude),
            lambda shapes: (
                *shapes.weights, shapes.state(),
                shapes.drafter.proposal(shapes.layout.batch_size, shapes.whole),
                *program_arguments.mask(shapes),
            ),
            lambda shapes: _cycle_results(shapes, 2),
            donated=(2,),
            loops=True,
        ),
        "prefill": Program(
            lambda shapes, rows: shapes.over_models(_prefill),
            _prefill_arguments,
            lambda shapes, rows: (places(shapes.state().cache), *(shapes.replicated,) * 3),
            donated=(2,),
        ),
    }  # fmt: skip
