"""The engine: calls on device state that every way of decoding is made of.

    prefill(state, lanes, pieces) -> state, lanes, anchors, logprobs    a chunk in every lane
    insert(state, lanes, anchors, lane, slot, request, said) -> state
    generate(state) -> state, report                 one dispatch of up to sync_every cycles
    release(state, slot) -> state

How a sequence samples, when it stops and how long it gets are device state, so one set of programs
serves all requests. Every shape is static: there is one prefill per size of a chunk, and one
program for everything else. `compile` builds them ahead of time; nothing compiles inside a measured
call. No call waits for the device.
"""

import concurrent.futures
import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.inference import adaptive, block_choice, controls, cycle, program_table, timing
from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.logprobs import Logprobs
from dflash.inference.pages import Layout, Slot
from dflash.inference.pieces import GREEDY, PrefillChunk, pack, padded
from dflash.inference.request import Request, check_request
from dflash.inference.sampling import SamplingParams
from dflash.inference.shapes import Shapes
from dflash.inference.state import DecodeState, Report
from dflash.models.decoder import Decoder

NUM_STOP_IDS = 8  # that a request may have, unless an engine is built for more
_MAX_THREADS = 4  # that compile at once
NO_STOP = -1  # fills up the stop ids of a request that has fewer


class Engine:
    """Decodes with one target and one drafter; holds weights and programs, no sequence state."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        config: DecodeConfig,
        *,
        max_length: int,
        adaptive_blocks: bool = False,
        num_stop_ids: int = NUM_STOP_IDS,
        revise: cycle.Revise | None = None,
        prefix_cache: bool | None = None,
    ):
        """Takes the models as they are; abstract ones serve to plan and to compile.

        Args:
          target: its weights are used in place.
          drafter: likewise.
          config: shape of the loop, and the rule of verification. Sampling is the requests' own.
          max_length: longest sequence in tokens, prompt and output together.
          adaptive_blocks: choose the block size anew for every cycle, up to the drafter's.
          num_stop_ids: stop ids that a request may have.
          revise: changes the result of every cycle; for measurements.
          prefix_cache: in place of the config's `decode.prefix_cache`, unless None.
        """
        wanted = config.prefix_cache if prefix_cache is None else prefix_cache
        self.prefix_cache = wanted and drafter.prefix_cache_mode != "never"
        sizes = block_choice.block_sizes(drafter.block_size) if adaptive_blocks else ()
        self.target, self.drafter, self.config = target, drafter, config
        self.sharding = target.sharding
        self.rules = cycle.Rules(
            block_sizes=sizes or (drafter.block_size,),
            rejection=config.verify == "rejection",
            revise=revise,
        )
        self.layout = Layout(
            batch_size=config.batch_size,
            max_length=max_length,
            block_size=drafter.block_size,
            page_size=config.page_size,
            prefill_chunk=config.prefill_chunk,
            num_replicas=self.sharding.size("pages"),
            growth=config.sync_every * drafter.longest_path,
            num_pages=config.num_pages,
            prefix_cache=self.prefix_cache,
            partial=config.partial_dispatches,
        )
        self.num_stop_ids = num_stop_ids
        self.shapes = Shapes(
            target,
            drafter,
            config,
            layout=self.layout,
            rules=self.rules,
            num_stop_ids=num_stop_ids,
        )
        self._programs = program_table.Programs(self.shapes)
        self.target_params = nnx.state(target)
        self.drafter_params = nnx.state(drafter)
        # Of each block size, in seconds, when all slots are busy, and when a dispatch covers fewer
        # of them; measured by `compile` where there is a choice.
        self.cycle_seconds: tuple[float, ...] | None = None
        self._partial_seconds: tuple[tuple[float, ...], ...] = ()
        self._plain_asked: dict[int, FirstTokenConstraints] = {}
        # Acceptance statistics of earlier runs, where there is a choice; see `retire`.
        self._known: block_choice.Pool | None = None

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Rows that a cycle may verify of a sequence, ascending."""
        return self.rules.block_sizes

    @property
    def vocab_size(self) -> int:
        """Token ids of the target."""
        return self.target.arch.vocab_size

    def has_room(self, max_length: int, num_stop_ids: int) -> bool:
        """Whether it serves sequences of `max_length` tokens with so many stop ids."""
        return max_length <= self.layout.max_length and num_stop_ids <= self.num_stop_ids

    def check(self, request: Request) -> None:
        """Raises InputError if a request cannot be decoded here."""
        check_request(
            request,
            max_length=self.layout.max_length,
            vocab_size=self.vocab_size,
            num_stop_ids=self.num_stop_ids,
        )

    # --- the four calls -------------------------------------------------------------------------

    def new_lanes(self) -> Any:
        """The drafter's state of the prompts in prefill, empty: a lane for each data replica."""
        return self.program("new_lanes")()

    def prefill(
        self, state: DecodeState, lanes: Any, pieces: Mapping[int, PrefillChunk]
    ) -> tuple[DecodeState, Any, jax.Array, Logprobs]:
        """Runs the next piece of the prompt in every lane that has one.

        Consumes `state` and `lanes` (their buffers are donated).

        Args:
          state: the batch; its cache takes the target's rows.
          lanes: the drafter's state of these prompts.
          pieces: by lane; a lane may use slots and pages of its own share alone.
        Returns:
          state; lanes; the token after each lane's piece, int32 [n]: the prompt's own, or the
          target's. It is negative if that one's logits are not finite. Log-probabilities [n] of
          the target's, where they are asked for.
        Raises:
          ValueError: a piece is empty, or longer than a chunk.
        """
        chunk = pack(pieces, self.num_lanes, self.layout)
        run = self.program("prefill", chunk.tokens.shape[1])
        samplings = [
            pieces[lane].sampling if lane in pieces else GREEDY for lane in range(self.num_lanes)
        ]
        numbers = jax.tree.map(lambda *one: np.stack(one), *map(SamplingParams.of, samplings))
        params = self.target_params, self.drafter_params
        asked = self._asked(pieces)
        cache, *drawn = run(*params, state.cache, lanes, chunk, asked, numbers)
        return dataclasses.replace(state, cache=cache), *drawn

    def _asked(self, pieces: Mapping[int, PrefillChunk]) -> FirstTokenConstraints:
        """What the sequences of all lanes ask of their first tokens."""
        plain = self._plain(self.num_lanes)
        given = {lane: one.asked for lane, one in pieces.items() if one.asked is not None}
        if not given:
            return plain
        host = jax.tree.map(np.array, plain)
        for lane, one in given.items():
            jax.tree.map(lambda all, mine, lane=lane: all.__setitem__(lane, mine), host, one)
        return host

    def _plain(self, lanes: int) -> FirstTokenConstraints:
        """What sequences ask for that ask for nothing: on the device, and made once."""
        if lanes not in self._plain_asked:
            self._plain_asked[lanes] = self.program("plain", lanes)()
        return self._plain_asked[lanes]

    def admit(
        self, state: DecodeState, slot: Slot, request: Request, said: Sequence[int] = ()
    ) -> DecodeState:
        """Prefills a whole prompt and puts it into a slot: all chunks, and `insert`.

        Args:
          state: the batch; consumed.
          slot: must be empty, and own the pages that the next dispatch may fill.
          request: the sequence.
          said: what it has said before, of which the last token becomes the anchor again.
        Raises:
          ValueError: the prompt is empty, or leaves no room for a new token; or the slot has more
            pages than a sequence may own.
        """
        self.page_row(slot)  # checks it
        lanes, lane = self.new_lanes(), self.layout.replica_of(slot.index)
        text, length = (*request.prompt, *said), len(request.prompt) + max(len(said) - 1, 0)
        if not 0 < length < self.layout.max_length:
            raise ValueError(
                f"prompt of {length} tokens, expected 1 to {self.layout.max_length - 1}"
            )
        for start in range(0, length, self.layout.longest_chunk):
            end = min(start + self.layout.longest_chunk, length)
            piece = PrefillChunk.of(text, start, end, slot.pages, request.sampling, fresh=not start)
            state, lanes, anchors, _ = self.prefill(state, lanes, {lane: piece})
        return self.insert(state, lanes, anchors, lane, slot, request, said)

    def insert(
        self,
        state: DecodeState,
        lanes: Any,
        anchors: jax.Array,
        lane: int,
        slot: Slot,
        request: Request,
        said: Sequence[int] = (),
    ) -> DecodeState:
        """Puts a prefilled sequence into a slot; consumes `state` (its buffers are donated).

        The device decides whether the sequence has ended already: its anchor may be a stop token,
        its last token, or none.

        Args:
          state: the batch.
          lanes: the drafter's state of everything before the anchor.
          anchors: int32 [n]; the last one that `prefill` has returned for these lanes.
          lane: where the sequence was prefilled; that of the slot's share.
          slot: must be empty, and own the pages that the next dispatch may fill.
          request: its limit and stop ids end the sequence.
          said: its output so far, as far as it is known: the anchor of a new sequence is not.
        Raises:
          ValueError: the slot has more pages than a sequence may own.
        """
        stop_ids = np.full(self.num_stop_ids, NO_STOP, np.int32)
        stop_ids[: len(set(request.stop_ids))] = sorted(set(request.stop_ids))
        where = (np.int32(lane), np.int32(slot.index))
        asked = self._plain(1).controls
        if not controls.is_plain(request):
            asked = controls.of_request(request, said, self.layout.max_length)
            asked = jax.tree.map(lambda x: x[None], asked)
        length = len(request.prompt) + max(1, len(said))
        return self.program("insert")(
            state, lanes, anchors, *where, self.page_row(slot), np.int32(length),
            np.int32(request.limit), stop_ids, asked, SamplingParams.of(request.sampling),
        )  # fmt: skip

    def generate(self, state: DecodeState, bucket: int | None = None) -> tuple[DecodeState, Report]:
        """Runs up to sync_every cycles; consumes `state` (its buffers are donated).

        Args:
          state: the batch.
          bucket: Number of slots to compute per replica, one of `layout.bucket_sizes`; all other
            slots must be empty. None for all slots.
        """
        whole = bucket in (None, self.layout.slots_per_replica)
        run = self.program("generate", *(() if whole else (bucket,)))
        return run(self.target_params, self.drafter_params, state)

    def draft(self, state: DecodeState) -> tuple[DecodeState, Proposal]:
        """Drafts for every slot, for `conclude` to verify; consumes `state`."""
        return self.program("draft")(self.target_params, self.drafter_params, state)

    def conclude(
        self, state: DecodeState, proposal: Proposal, allowed: np.ndarray, ready: np.ndarray
    ) -> tuple[DecodeState, Report]:
        """A cycle that verifies a proposal under masks, before `generate`; consumes `state`.

        Args:
          state: as `draft` left it.
          proposal: what it returned.
          allowed: int32 [B, R, ceil(V / 32)]; see `dispatch.conclude`.
          ready: bool [B]; constrained sequences whose masks are there.
        """
        params = self.target_params, self.drafter_params
        return self.program("conclude")(*params, state, proposal, allowed, ready)

    def release(self, state: DecodeState, slot: int) -> DecodeState:
        """Takes a slot's pages from it, so that they may be handed out again."""
        return self.program("release")(state, np.int32(slot))

    def set_pages(self, state: DecodeState, slots: Sequence[Slot]) -> DecodeState:
        """Gives slots the pages that they own now; slots that are not named own none.

        Consumes `state` (its buffers are donated).
        """
        table = np.zeros((self.layout.batch_size, self.layout.pages_per_sequence), np.int32)
        for slot in slots:
            table[slot.index] = self.page_row(slot)
        return self.program("set_pages")(state, table)

    def page_row(self, slot: Slot) -> np.ndarray:
        """A slot's row of the page table, int32 [pages of the longest sequence]."""
        most = self.layout.pages_per_sequence
        if len(slot.pages) > most:
            raise ValueError(
                f"slot {slot.index} has {len(slot.pages)} pages; a sequence owns at most {most}"
            )
        return padded(slot.pages, most)

    # --- state ----------------------------------------------------------------------------------

    @property
    def num_lanes(self) -> int:
        """Prompts that are prefilled at once: one for each data replica."""
        return self.shapes.num_lanes

    def new_state(self) -> DecodeState:
        """A batch of empty slots."""
        state = self.program("new_state")(self._measured())
        return dataclasses.replace(state, adaptive=adaptive.with_pool(state.adaptive, self._known))

    def retire(self, state: DecodeState) -> None:
        """Keeps a run's acceptance statistics: the next run begins with them."""
        if state.adaptive is not None:
            self._known = block_choice.pool(state.adaptive.choice)

    # --- beside the four calls ------------------------------------------------------------------

    def add_program(self, name: str, function: Callable) -> None:
        """Adds a program over the models and the state; it is compiled at its first `run`.

        Args:
          name: for `run`.
          function: (target, drafter, state) -> any pytree. A DecodeState in it is placed as the
            state is, all else is replicated. If there is one, the program consumes its input.
        """
        self._programs.add(name, function)

    def program(self, kind: str, *key: int) -> jax.stages.Compiled:
        """The compiled program of this name, compiled now if it is asked for the first time."""
        return self._programs.get(kind, *key)

    def run(self, name: str, state: DecodeState) -> Any:
        """Runs a program that was added on this state; see `add_program`."""
        return self.program(name)(self.target_params, self.drafter_params, state)

    def set_drafter(self, drafter: Drafter) -> None:
        """Takes other weights for the drafter; nothing is compiled again.

        Raises:
          ValueError: it is not built as the one before.
        """
        params = nnx.state(drafter)
        if _forms(params) != _forms(self.drafter_params):
            raise ValueError("the drafter's weights differ in shape or dtype from those before")
        self.drafter_params = params

    def with_drafter(self, drafter: Drafter) -> "Engine | None":
        """An engine with another drafter that shares all programs of this one.

        Returns:
          The engine; None if the drafter is not built as this one's, so that programs differ.
        """
        if nnx.graphdef(drafter) != nnx.graphdef(self.drafter):
            return None
        twin = copy.copy(self)
        try:
            twin.set_drafter(drafter)
        except ValueError:
            return None
        twin.drafter, twin._known = drafter, None
        return twin

    # --- ahead of time --------------------------------------------------------------------------

    def compile(
        self,
        prompt_lengths: Iterable[int],
        progress: Callable[[int, int], None] = lambda ready, total: None,
        *,
        grammars: bool = False,
    ) -> None:
        """Compiles every program that prompts of these lengths need, and that is not there yet.

        Args:
          prompt_lengths: in tokens.
          progress: called before the first and after each program with how many are ready, and
            how many there are to compile.
          grammars: also what sequences with grammars need; else the first one waits for it.
        """
        names = self._programs.missing(prompt_lengths, grammars=grammars)
        if names:
            progress(0, len(names))
        # The compiler works while the next program is traced. Processes of a run keep one order.
        threads = min(_MAX_THREADS, os.cpu_count() or 1) if jax.process_count() == 1 else 1
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            begun = [pool.submit(self.program, *name) for name in names]
            try:
                for ready, one in enumerate(concurrent.futures.as_completed(begun), start=1):
                    one.result()
                    progress(ready, len(names))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self._measured()

    def program_names(self, prompt_lengths: Iterable[int]) -> list[tuple]:
        """Names of the programs that prompts of these lengths (in tokens) need."""
        return program_table.names(self.shapes, prompt_lengths)

    def abstract_state(self) -> DecodeState:
        """Shapes, dtypes and shardings of the state, without its memory."""
        return self.shapes.state()

    def _measured(self) -> np.ndarray:
        """Returns the seconds of a cycle by batch bucket and block size, float32 [W, S].

        They are measured at the first call. With a single block size, all are 1.
        """
        if self.cycle_seconds is None and len(self.block_sizes) > 1:
            *partial, self.cycle_seconds = map(self._measure, self.layout.bucket_sizes)
            self._partial_seconds = tuple(partial)
        whole = self.cycle_seconds or (1.0,)
        missing = len(self.layout.bucket_sizes) - 1 - len(self._partial_seconds)
        return np.array([*self._partial_seconds, *[whole] * (1 + missing)], np.float32)

    def _measure(self, bucket: int) -> tuple[float, ...]:
        """Returns the seconds of a cycle of each block size, over `bucket` slots per replica."""

        def table(seconds: np.ndarray) -> np.ndarray:
            return np.tile(seconds, (len(self.layout.bucket_sizes), 1))

        state = self.program("new_state")(table(adaptive.only(0, self.block_sizes)))
        return timing.cycle_seconds(
            self.block_sizes,
            state,
            lambda state, seconds: self.program("occupied")(state, table(seconds)),
            functools.partial(self.generate, bucket=bucket),
        )


def _forms(params) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), params)
