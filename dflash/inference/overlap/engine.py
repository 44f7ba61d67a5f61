"""Speculative speculative decoding: the drafter works on devices of its own, beside the target.

    target's devices    verify block n        |  verify block n + 1     |  …
    drafter's devices     draft for its likely outcomes; look up the outcome  |  …

The host starts the programs of both sides and moves the results between them, and waits for
neither: every decision is made on a device. Source: arXiv 2603.03251.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.engine import NUM_STOP_IDS, Engine
from dflash.inference.overlap.drafter_side import DrafterSide
from dflash.inference.overlap.drafting import Anchors, DraftingState
from dflash.inference.overlap.relay import Relay, RelayState, Rows
from dflash.inference.pages import Slot
from dflash.inference.prefill import PrefillChunk
from dflash.inference.program_table import Name
from dflash.models.decoder import Decoder
from dflash.parallel.sharding import Sharding

_Prompts = tuple[RelayState, Any]  # State of the prompts in prefill, on both sides.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OverlappedState:
    """States of a batch on both sides, and whether some sequences have no drafts yet."""

    decode: DecodeState
    drafting: DraftingState
    undrafted: bool = dataclasses.field(default=False, metadata={"static": True})


class OverlappedEngine:
    """Engine of the target and the drafter's side; other attributes are those of the engine."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        config: DecodeConfig,
        *,
        fan_out: int,
        drafter_sharding: Sharding,
        max_length: int,
        num_stop_ids: int = NUM_STOP_IDS,
    ):
        """Creates both sides, see `Engine`; a prefix cache and partial dispatches are off.

        Args:
          drafter: Drafter of chains on other devices; all drafts but the last are verified.
          fan_out: Number of bonus tokens to foresee for each number of accepted drafts.
          drafter_sharding: Placement of arrays on the drafter's devices.
        """
        relay = Relay(drafter, target, fan_out, config.prefill_chunk)
        off = {"prefix_cache": False, "partial_dispatches": False}
        one_cycle = dataclasses.replace(config, sync_every=1, **off)
        sizes = {"max_length": max_length, "num_stop_ids": num_stop_ids}
        self._engine = Engine(target, relay, one_cycle, **sizes)
        self._side = DrafterSide(drafter, drafter_sharding, self._engine.shapes)
        self._cycles = config.sync_every
        growth = config.sync_every * relay.longest_path
        self.layout = dataclasses.replace(self._engine.layout, growth=growth)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the target's engine."""
        return getattr(self._engine, name)

    # --- the calls ------------------------------------------------------------------------------

    def new_state(self) -> OverlappedState:
        """Returns a batch of empty slots; takes over the target's embedding and output head."""
        self._side.refresh(self._engine.target_params)
        return OverlappedState(self._engine.new_state(), self._side.programs.get("new_state")())

    def new_prefill_state(self) -> _Prompts:
        """Returns the empty states of the prompts in prefill."""
        return self._engine.new_prefill_state(), self._side.programs.get("new_prefill_state")()

    def prefill(
        self, state: OverlappedState, prompts: _Prompts, chunks: Mapping[int, PrefillChunk]
    ) -> tuple:
        """Runs the next chunk of every prompt; see `Engine.prefill`."""
        decode, relayed, *drawn = self._engine.prefill(state.decode, prompts[0], chunks)
        rows = self.layout.chunk(max(len(chunk.tokens) for chunk in chunks.values()))
        of_prompts = self._side.receive(relayed.rows)
        there = self._side.run(("observe_prompts", rows), prompts[1], of_prompts)
        return dataclasses.replace(state, decode=decode), (relayed, there), *drawn

    def insert(
        self, state: OverlappedState, prompts: _Prompts, anchors, row: int, slot: Slot, *request
    ) -> OverlappedState:
        """Puts the prompt in prefill slot `row` into a slot; see `Engine.insert`."""
        decode = self._engine.insert(state.decode, prompts[0], anchors, row, slot, *request)
        where = np.int32(row), np.int32(slot.index)
        drafting = self._side.run(("insert",), state.drafting, prompts[1], *where)
        return OverlappedState(decode, drafting, undrafted=True)

    def generate(
        self, state: OverlappedState, bucket: None = None, *, greedy: bool = False, **unused: int
    ) -> tuple[OverlappedState, list[Report]]:
        """Runs sync_every cycles of all slots, and returns the report of each; see `Engine`.

        All of them run however many slots are idle, since the host starts them ahead.
        """
        state, reports = self._drafted(state), []
        for _ in range(self._cycles):
            state, report = self._answer(state, *self._engine.generate(state.decode, greedy=greedy))
            reports.append(report)
        return state, reports

    def draft(self, state: OverlappedState) -> tuple[OverlappedState, Proposal]:
        """Returns the proposal of all slots; see `Engine.draft`."""
        state = self._drafted(state)
        decode, proposal = self._engine.draft(state.decode)
        return dataclasses.replace(state, decode=decode), proposal

    def conclude(self, state: OverlappedState, *of_proposal: Any) -> tuple[OverlappedState, Report]:
        """Runs a cycle that verifies a proposal under masks; see `Engine.conclude`."""
        return self._answer(state, *self._engine.conclude(state.decode, *of_proposal))

    def release(self, state: OverlappedState, slot: int) -> OverlappedState:
        """Empties a slot; see `Engine.release`."""
        return dataclasses.replace(state, decode=self._engine.release(state.decode, slot))

    def set_pages(self, state: OverlappedState, slots: Sequence[Slot]) -> OverlappedState:
        """Sets the pages of all slots; see `Engine.set_pages`."""
        return dataclasses.replace(state, decode=self._engine.set_pages(state.decode, slots))

    def retire(self, state: OverlappedState) -> None:
        """Keeps what a run has learnt; see `Engine.retire`."""
        self._engine.retire(state.decode)

    def _answer(
        self, state: OverlappedState, decode: DecodeState, report: Report
    ) -> tuple[OverlappedState, Report]:
        """Lets the drafter take in a verification, and propose the next drafts."""
        where, active = self._where(decode), self._side.receive(report.active)
        drafting, events = self._side.run(("advance",), state.drafting, *where, active)
        events = jax.device_put(events, self._engine.shapes.replicated)
        return self._proposed(decode, drafting, where), dataclasses.replace(report, events=events)

    def _drafted(self, state: OverlappedState) -> OverlappedState:
        """Drafts if some sequences have no drafts yet."""
        if not state.undrafted:
            return state
        rows, anchors = self._where(state.decode)
        drafting = self._side.run(("draft",), state.drafting, anchors)
        return self._proposed(state.decode, drafting, (rows, anchors))

    def _proposed(
        self, decode: DecodeState, drafting: DraftingState, where: tuple[Rows, Anchors]
    ) -> OverlappedState:
        """Sends drafts to the target, and drafts for their outcomes meanwhile."""
        ranked = jax.device_put(drafting.ranked, self._engine.shapes.replicated)
        relayed = dataclasses.replace(decode.drafter, ranked=ranked)
        drafting = self._side.run(("speculate",), drafting, *where)
        return OverlappedState(dataclasses.replace(decode, drafter=relayed), drafting)

    def _where(self, decode: DecodeState) -> tuple[Rows, Anchors]:
        """Returns the newest rows and the anchors, on the drafter's devices."""
        anchors = Anchors(decode.anchor, decode.length, decode.sampling)
        return self._side.receive((decode.drafter.rows, anchors))

    # --- programs -------------------------------------------------------------------------------

    def program_names(self, prompt_lengths: Iterable[int], **needs: bool) -> list[Name]:
        """Returns the names of both sides' programs; see `Engine.program_names`."""
        lengths = list(prompt_lengths)
        there = [("drafter:", *name) for name in self._side.names(self.layout.chunks(lengths))]
        return self._engine.program_names(lengths, **needs) + there

    def compile(
        self, prompt_lengths: Iterable[int], *progress: Callable[[int, int], None], **needs: bool
    ) -> None:
        """Compiles the missing programs of one side, then of the other; see `Engine.compile`."""
        lengths, programs = list(prompt_lengths), self._side.programs
        self._engine.compile(lengths, *progress, **needs)
        names = self._side.names(self.layout.chunks(lengths))
        programs.compile_all(programs.missing(names), *progress)

    def beside(self) -> tuple[int, dict[str, Any]]:
        """Returns the number of the drafter's devices, and abstract arrays on them by kind."""
        side = self._side
        weights, heads = nnx.state(side.drafter, nnx.Param), nnx.state(side.heads)
        arrays = {"drafter weights": weights, "target's heads": heads}
        return side.sharding.mesh.size, arrays | {"drafter state": (side.state(), side.prompts())}
