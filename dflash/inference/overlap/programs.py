"""Programs of overlapped decoding: those of the target's devices and those of the drafter's."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.drafters.base import Drafter, Proposal
from dflash.inference import batch_buckets, program_table, shapes
from dflash.inference.cycle import dispatch
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.overlap import drafting
from dflash.inference.overlap.drafting import DraftingState, Observed
from dflash.inference.overlap.relay import Exchange, Mail, Relay
from dflash.inference.overlap.speculation import SpeculationCache
from dflash.inference.prefill import prefill_chunk
from dflash.inference.program_table import Program
from dflash.inference.shapes import Shapes, places
from dflash.models.decoder import Decoder
from dflash.parallel.compiler_options import loop_options
from dflash.parallel.sharding import Sharding, zeros


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Way in which drafting overlaps verification.

    Attributes:
      groups: Number of equal groups of slots, which the target verifies in turn.
      fan_out: Number of bonus tokens to foresee for each number of accepted drafts; 0 to draft
        once the outcome is known.
    """

    groups: int
    fan_out: int

    @classmethod
    def of(cls, drafter_config: Any) -> "Overlap | None":
        """Returns the overlap that the config group `drafter` asks for; None for none."""
        kinds = {"ssd": cls(1, drafter_config.fan_out), "pingpong": cls(2, 0)}
        return kinds.get(drafter_config.overlap)

    def num_verified(self, drafter: Drafter) -> int:
        """Returns the number of drafts to verify: with speculation, all but the last.

        The distribution of the last one is that of the bonus token after all others.
        """
        return drafter.num_draft_tokens - (1 if self.fan_out else 0)

    def num_forks(self, drafter: Drafter) -> int:
        """Returns the number of outcomes to foresee per sequence."""
        return drafter.num_draft_tokens * self.fan_out


class DraftingShapes:
    """Abstract arguments and results of the programs on the drafter's devices.

    Attributes:
      drafter: The drafter, for its shape and placement.
      heads: Model with the target's embedding and output head alone, placed as the drafter is.
      sharding: Placement of arrays on the drafter's devices.
      overlap: How drafting overlaps verification.
      target: Shapes of the target's programs.
      dtype: Dtype that decides the precision of products.
      weights: Abstract weights of heads and drafter.
    """

    def __init__(self, drafter: Drafter, sharding: Sharding, overlap: Overlap, target: Shapes):
        drafter.num_forks = overlap.num_forks(drafter)
        self.drafter, self.sharding, self.overlap, self.target = drafter, sharding, overlap, target
        self.heads = make_heads(target.target, sharding, alone=drafter.drafts_with_model)
        self.heads_graph, heads = nnx.split(self.heads)
        self.drafter_graph, weights = nnx.split(drafter)
        self.weights = shapes.abstract(heads), shapes.abstract(weights)
        self.dtype = target.dtype

    @property
    def loop_options(self) -> dict[str, str]:
        """Compiler options of programs with loops over layers' weights."""
        return loop_options(self.sharding, self.dtype)

    def whole(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Returns an array that every device holds whole."""
        return self.sharding.abstract(shape, (None,) * len(shape), dtype)

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """Sharding of an array that every device holds whole."""
        return self.sharding.replicated()

    @property
    def batch(self) -> int:
        """Number of slots of a group."""
        return self.target.layout.batch_size // self.overlap.groups

    def observed(self, batch: int) -> Observed:
        """Returns the drafter's state of `batch` sequences."""
        layout = self.target.layout
        # The last forks of a sequence draft past its end.
        state = self.drafter.init_state(batch, layout.capacity + self.drafter.block_size)
        features = abstract_mail(self.target, batch, 1, self.whole).features
        return Observed(state, self.whole((batch, features.shape[-1]), features.dtype))

    def mail(self, batch: int, rows: int) -> Mail:
        """Returns `rows` rows of each sequence."""
        return abstract_mail(self.target, batch, rows, self.whole)

    def proposal(self) -> Proposal:
        """Returns the proposal of a group."""
        return self.target.drafter.proposal(self.batch, self.whole)

    def state(self) -> DraftingState:
        """Returns the state of a group."""
        ints, proposal = self.whole((self.batch,)), self.proposal()
        count, fan_out = proposal.tokens.shape[1], self.overlap.fan_out
        cache = None
        if fan_out:
            bonus = self.batch, count + 1, fan_out
            cache = SpeculationCache(self.whole(bonus), self.whole((*bonus, count)))
        return DraftingState(
            self.observed(self.batch), ints, ints, self._sampling(), proposal, cache
        )

    def one_sampling(self) -> Any:
        """Returns the sampling parameters of one sequence, without a batch dimension."""
        return self._here(self.target.one_sampling())

    def over_models(self, function: Callable) -> Callable:
        """Turns a function of (heads, drafter, …) into one of (their weights, …)."""

        def program(heads, drafter, *args):
            models = nnx.merge(self.heads_graph, heads), nnx.merge(self.drafter_graph, drafter)
            return function(*models, *args)

        return program

    def _sampling(self) -> Any:
        return self._here(self.target.state(self.batch // self.target.layout.num_replicas).sampling)

    def _here(self, arrays: Any) -> Any:
        return jax.tree.map(lambda x: self.whole(x.shape, x.dtype), arrays)


def make_heads(target: Decoder, sharding: Sharding, *, alone: bool) -> nnx.Module:
    """Returns an abstract model without layers: a target's embedding, last norm and output head.

    Args:
      target: The target.
      sharding: Placement of the weights.
      alone: The drafter has an embedding and head of its own; return a module without weights.
    """
    if alone:
        return nnx.Module()
    arch = dataclasses.replace(target.arch, num_hidden_layers=0)
    return type(target)(arch, dtype=target.dtype, sharding=sharding)


def abstract_mail(shapes: Shapes, batch: int, rows: int, place: Callable[..., Any]) -> Mail:
    """Returns abstract mail; `place` makes (shape, dtype) an array."""
    relay, arch = shapes.drafter, shapes.target.arch
    width = len(relay.feature_layers) * arch.hidden_size
    return relay.mail(batch, rows, width, shapes.target.dtype, place)


# --- the target's devices -------------------------------------------------------------------------


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
    target, relay, cache, _, *prompts = program_table.prefill_arguments(shapes, rows)
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
                *program_table.mask_arguments(shapes),
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


# --- the drafter's devices ------------------------------------------------------------------------


def _insert_arguments(shapes: DraftingShapes) -> tuple:
    count, number = shapes.target.num_prefill_slots, shapes.whole(())
    prompts = shapes.observed(count), shapes.whole((count,))
    return shapes.state(), *prompts, number, number, number, shapes.one_sampling()


def _prompt_arguments(shapes: DraftingShapes, rows: int) -> tuple:
    count = shapes.target.num_prefill_slots
    mail, fresh = shapes.mail(count, rows), shapes.whole((count,), jnp.bool_)
    return *shapes.weights, shapes.observed(count), mail, fresh


def _advance_arguments(shapes: DraftingShapes) -> tuple:
    mail = shapes.mail(shapes.batch, shapes.target.drafter.longest_path)
    return *shapes.weights, shapes.state(), mail, shapes.whole((shapes.batch,), jnp.bool_)


DRAFTING_TABLE = {
    "new_state": Program(
        lambda shapes: lambda: zeros(shapes.state()),
        lambda shapes: (),
        lambda shapes: places(shapes.state()),
    ),
    "new_prefill_state": Program(
        lambda shapes: lambda: zeros(shapes.observed(shapes.target.num_prefill_slots)),
        lambda shapes: (),
        lambda shapes: places(shapes.observed(shapes.target.num_prefill_slots)),
    ),
    "prefill": Program(
        lambda shapes, rows: shapes.over_models(drafting.observe_prompts),
        _prompt_arguments,
        lambda shapes, rows: places(shapes.observed(shapes.target.num_prefill_slots)),
        donated=(2,),
    ),
    "insert": Program(
        lambda shapes: functools.partial(drafting.insert, shapes.drafter),
        _insert_arguments,
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    "draft": Program(
        lambda shapes: shapes.over_models(drafting.draft),
        lambda shapes: (*shapes.weights, shapes.state()),
        lambda shapes: places(shapes.state()),
        donated=(2,),
        loops=True,
    ),
    "advance": Program(
        lambda shapes: shapes.over_models(drafting.advance),
        _advance_arguments,
        lambda shapes: (places(shapes.state()), shapes.replicated),
        donated=(2,),
        loops=True,
    ),
    "speculate": Program(
        lambda shapes: shapes.over_models(
            functools.partial(drafting.speculate, fan_out=shapes.overlap.fan_out)
        ),
        lambda shapes: (*shapes.weights, shapes.state()),
        lambda shapes: places(shapes.state()),
        donated=(2,),
        loops=True,
    ),
}
