"""Engine whose drafter runs on devices of its own, at the same time as the target.

    target's devices    verify block n        |  verify block n + 1     |  …
    drafter's devices     draft for its likely outcomes; look up the outcome  |  …

The calls are those of `Engine`. The host starts the programs of both sides and moves the results
between them, and waits for neither: every decision is made on a device.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.inference import program_table, weight_update
from dflash.inference.cycle import dispatch
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.engine import NUM_STOP_IDS, Engine
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.logits.sampling import SamplingParams
from dflash.inference.overlap.drafting import DraftingState, Observed
from dflash.inference.overlap.drafting_programs import DRAFTING_TABLE, DraftingShapes
from dflash.inference.overlap.overlap import Overlap
from dflash.inference.overlap.relay import Mail, Relay
from dflash.inference.overlap.target_programs import target_table
from dflash.inference.pages import Slot
from dflash.inference.prefill import PrefillChunk
from dflash.inference.program_table import Name, Programs
from dflash.inference.request import Request
from dflash.models.decoder import Decoder
from dflash.parallel.sharding import Sharding

_REPORTS: list[Name] = [("new_report",), ("join_reports",)]  # Programs beside those of `Engine`.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OverlappedState:
    """State of a batch on both sides.

    Attributes:
      decode: State of the target's devices.
      drafting: State of the drafter's devices, by group of slots.
      proposals: Next proposal of each group, on the target's devices.
      undrafted: Groups with sequences that no proposal covers yet.
    """

    decode: DecodeState
    drafting: tuple[DraftingState, ...]
    proposals: tuple[Proposal, ...]
    undrafted: frozenset[int] = dataclasses.field(metadata={"static": True})


class OverlappedEngine(Engine):
    """Engine over a target and a drafter on disjoint devices."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        config: DecodeConfig,
        *,
        overlap: Overlap,
        drafter_sharding: Sharding,
        max_length: int,
        num_stop_ids: int = NUM_STOP_IDS,
    ):
        """Creates an engine; see `Engine`.

        Args:
          target: Target model.
          drafter: Drafter, placed on other devices than the target.
          config: Sizes of the loop and the verification rule. A prefix cache and partial
            dispatches are not supported, and are off.
          overlap: How drafting overlaps verification.
          drafter_sharding: Placement of arrays on the drafter's devices.
          max_length: Length of the longest sequence in tokens, prompt and output together.
          num_stop_ids: Number of stop ids that a request may have.
        """
        self.table, self.overlap = target_table(overlap), overlap
        relay = Relay(drafter, overlap.num_verified(drafter))
        config = dataclasses.replace(config, prefix_cache=False, partial_dispatches=False)
        super().__init__(target, relay, config, max_length=max_length, num_stop_ids=num_stop_ids)
        self.drafting_shapes = DraftingShapes(drafter, drafter_sharding, overlap, self.shapes)
        self._drafting = Programs(self.drafting_shapes, DRAFTING_TABLE)
        self._weights = nnx.state(self.drafting_shapes.heads), nnx.state(drafter)
        self._there = drafter_sharding.replicated()

    # --- the calls ------------------------------------------------------------------------------

    def new_state(self) -> OverlappedState:
        """Returns a batch of empty slots; takes over the target's embedding and output head."""
        self._weights = self._heads(), self._weights[1]
        groups = range(self.overlap.groups)
        drafting = tuple(self._drafting.get("new_state")() for _ in groups)
        proposals = tuple(self._send(one.proposal) for one in drafting)
        return OverlappedState(super().new_state(), drafting, proposals, frozenset())

    def new_prefill_state(self) -> Observed:
        """Returns the drafter's empty state of the prompts in prefill."""
        return self._drafting.get("new_prefill_state")()

    def prefill(
        self, state: OverlappedState, prefill_state: Observed, chunks: Mapping[int, PrefillChunk]
    ) -> tuple[OverlappedState, Observed, jax.Array, Logprobs]:
        """Runs the next chunk of every prompt; see `Engine.prefill`."""
        inputs, *of_prompts = self._prompt_inputs(chunks)
        run = self.program("prefill", inputs.tokens.shape[1])
        weights, cache = (self.target_params, self.drafter_params), state.decode.cache
        cache, mail, anchors, logprobs = run(*weights, cache, inputs, *of_prompts)
        observe = self._drafting.get("prefill", inputs.tokens.shape[1])
        prefill_state = observe(*self._weights, prefill_state, self._receive(mail), inputs.fresh)
        decode = dataclasses.replace(state.decode, cache=cache)
        return dataclasses.replace(state, decode=decode), prefill_state, anchors, logprobs

    def insert(
        self,
        state: OverlappedState,
        prefill_state: Observed,
        anchors: jax.Array,
        prefill_slot: int,
        slot: Slot,
        request: Request,
        output_ids: Sequence[int] = (),
    ) -> OverlappedState:
        """Puts a prefilled sequence into a slot; see `Engine.insert`."""
        decode = super().insert(state.decode, (), anchors, prefill_slot, slot, request, output_ids)
        group, local = self._place(slot.index)
        length = len(request.prompt) + max(1, len(output_ids))
        where = (np.int32(prefill_slot), np.int32(local), np.int32(length))
        params = SamplingParams.of(request.sampling)
        anchors = self._receive(anchors)
        drafting = self._drafting.get("insert")(
            state.drafting[group], prefill_state, anchors, *where, params
        )
        return dataclasses.replace(
            state,
            decode=decode,
            drafting=_replaced(state.drafting, group, drafting),
            undrafted=state.undrafted | {group},
        )

    def generate(
        self,
        state: OverlappedState,
        bucket: int | None = None,
        *,
        greedy: bool = False,
        max_idle: int = dispatch.ANY,
    ) -> tuple[OverlappedState, Report]:
        """Runs sync_every cycles of every group, all slots of it; see `Engine.generate`.

        All of them run however many slots are idle, since the host starts them ahead. One program
        serves greedy requests and all others.
        """
        state = self._drafted(state)
        reports = []
        for _ in range(self.config.sync_every):
            report = self.program("new_report")()
            for group in range(self.overlap.groups):
                state, report = self._cycle(state, group, report)
            reports.append(report)
        return state, self.program("join_reports")(reports)

    def _cycle(
        self, state: OverlappedState, group: int, report: Report
    ) -> tuple[OverlappedState, Report]:
        """Verifies the proposal of a group, and starts the next draft."""
        models = self.target_params, self.drafter_params
        decode, report, *mail = self.program("generate")(
            *models, state.decode, report, state.proposals[group], np.int32(group)
        )
        return self._answer(dataclasses.replace(state, decode=decode), group, report, mail)

    def _answer(
        self, state: OverlappedState, group: int, report: Report, mail: tuple[Mail, jax.Array]
    ) -> tuple[OverlappedState, Report]:
        """Lets the drafter take in a verification of a group, and propose the next block."""
        drafting, foreseen = self._drafting.get("advance")(
            *self._weights, state.drafting[group], *self._receive(mail)
        )
        if self.overlap.fan_out:
            report = dataclasses.replace(report, foreseen=self._send(foreseen))
        return self._proposed(state, group, drafting), report

    def _drafted(self, state: OverlappedState) -> OverlappedState:
        """Drafts for the groups with sequences that no proposal covers."""
        for group in sorted(state.undrafted):
            drafting = self._drafting.get("draft")(*self._weights, state.drafting[group])
            state = self._proposed(state, group, drafting)
        return dataclasses.replace(state, undrafted=frozenset())

    def _proposed(
        self, state: OverlappedState, group: int, drafting: DraftingState
    ) -> OverlappedState:
        """Sends a group's proposal to the target, and drafts for its outcomes meanwhile."""
        proposal = self._send(drafting.proposal)
        if self.overlap.fan_out:
            drafting = self._drafting.get("speculate")(*self._weights, drafting)
        return dataclasses.replace(
            state,
            drafting=_replaced(state.drafting, group, drafting),
            proposals=_replaced(state.proposals, group, proposal),
        )

    def draft(self, state: OverlappedState) -> tuple[OverlappedState, Proposal]:
        """Returns the proposal of all slots; see `Engine.draft`."""
        state = self._drafted(state)
        return state, self.program("draft")(*state.proposals)

    def conclude(
        self, state: OverlappedState, proposal: Proposal, allowed: np.ndarray, ready: np.ndarray
    ) -> tuple[OverlappedState, Report]:
        """Runs a cycle that verifies a proposal under masks; see `Engine.conclude`."""
        params = self.target_params, self.drafter_params
        decode, report, mail = self.program("conclude")(
            *params, state.decode, proposal, allowed, ready
        )
        state = dataclasses.replace(state, decode=decode)
        for group, own in enumerate(mail):
            state, report = self._answer(state, group, report, own)
        return state, report

    def release(self, state: OverlappedState, slot: int) -> OverlappedState:
        """Empties a slot; see `Engine.release`."""
        return dataclasses.replace(state, decode=super().release(state.decode, slot))

    def set_pages(self, state: OverlappedState, slots: Sequence[Slot]) -> OverlappedState:
        """Sets the pages of all slots; see `Engine.set_pages`."""
        return dataclasses.replace(state, decode=super().set_pages(state.decode, slots))

    def retire(self, state: OverlappedState) -> None:
        """Does nothing, since the block size is fixed."""

    # --- models and programs --------------------------------------------------------------------

    def set_drafter(self, drafter: Drafter) -> None:
        """Replaces the drafter's weights; see `Engine.set_drafter`."""
        params = nnx.state(drafter)
        if not weight_update.have_same_forms(params, self._weights[1]):
            raise ValueError("the drafter's weights differ in shape or dtype from those before")
        self._weights = self._weights[0], params

    def with_drafter(self, drafter: Drafter) -> Engine | None:
        """Returns None, since an engine's programs belong to one drafter."""
        return None

    def compile(
        self,
        prompt_lengths: Iterable[int],
        progress: Callable[[int, int], None] = lambda ready, total: None,
        *,
        grammars: bool = False,
        greedy: bool = False,
    ) -> None:
        """Compiles every missing program of both sides; see `Engine.compile`."""
        lengths = list(prompt_lengths)
        names = program_table.names(self.shapes, lengths, grammars=grammars) + _REPORTS
        here, there = self._programs.missing(names), self._drafting.missing(self._beside(lengths))
        total = len(here) + len(there)
        self._programs.compile_all(here, lambda ready, _: progress(ready, total))
        self._drafting.compile_all(there, lambda ready, _: progress(len(here) + ready, total))

    def program_names(self, prompt_lengths: Iterable[int], *, greedy: bool = False) -> list[tuple]:
        """Returns the names of both sides' programs; see `Engine.program_names`."""
        lengths = list(prompt_lengths)
        beside = [("drafter:", *name) for name in self._beside(lengths)]
        return super().program_names(lengths) + _REPORTS + beside

    def _beside(self, prompt_lengths: Sequence[int]) -> list[Name]:
        """Returns the names of the drafter's programs that prompts of some lengths need."""
        kinds = ["new_state", "new_prefill_state", "insert", "draft", "advance"]
        kinds += ["speculate"] if self.overlap.fan_out else []
        chunks = self.layout.chunks(prompt_lengths)
        return [*((kind,) for kind in kinds), *(("prefill", rows) for rows in chunks)]

    def drafting_program(self, kind: str, *sizes: int) -> jax.stages.Compiled:
        """Returns the compiled program of the drafter's devices; see `program`."""
        return self._drafting.get(kind, *sizes)

    def abstract_drafting(self) -> tuple[Any, Any]:
        """Returns the heads and states of the drafter's devices, without allocating them."""
        prompts = self.drafting_shapes.observed(self.num_prefill_slots)
        states = (self.drafting_shapes.state(),) * self.overlap.groups
        return nnx.state(self.drafting_shapes.heads), (*states, prompts)

    def _heads(self) -> Any:
        """Returns copies of the target's weights on the drafter's devices."""
        of_target = dict(nnx.to_flat_state(self.target_params))
        heads = nnx.to_flat_state(nnx.state(self.drafting_shapes.heads))
        copies = [
            (path, leaf.replace(jax.device_put(of_target[path][...], leaf.get_value().sharding)))
            for path, leaf in heads
        ]
        return nnx.from_flat_state(copies)

    def _place(self, slot: int) -> tuple[int, int]:
        """Returns the group of a slot, and its index there."""
        replica, within = divmod(slot, self.layout.slots_per_replica)
        size = self.layout.slots_per_replica // self.overlap.groups
        return within // size, replica * size + within % size

    def _send(self, arrays: Any) -> Any:
        """Moves arrays to the target's devices."""
        return jax.device_put(arrays, self.shapes.replicated)

    def _receive(self, arrays: Any) -> Any:
        """Moves arrays to the drafter's devices."""
        return jax.device_put(arrays, self._there)


def _replaced(items: tuple, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
