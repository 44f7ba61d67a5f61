"""The engine: calls on device state from which every way of decoding is built.

    prefill(state, prefill_state, chunks) -> state, prefill_state, anchors, logprobs
    insert(state, prefill_state, anchors, prefill_slot, slot, request, output_ids) -> state
    generate(state) -> state, report                 one dispatch of up to sync_every cycles
    release(state, slot) -> state

Sampling and limits of each sequence are device state, so one set of programs serves all requests.
Batches of greedy requests alone have smaller ones; see `Engine.generate`.
`compile` builds them ahead of time; nothing compiles inside a measured call, and none waits.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.wrappers.chosen_window import ChosenWindow
from dflash.drafters.wrappers.copies import WithCopies
from dflash.inference import (
    first_token,
    program_table,
    prompt_logprobs,
    timing,
    weight_update,
)
from dflash.inference.cycle import choice, dispatch
from dflash.inference.cycle.choices import Choices, exact_rows
from dflash.inference.cycle.rules import Revise, Rules
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.logits import controls
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.logits.sampling import SamplingParams
from dflash.inference.pages import Layout, Slot
from dflash.inference.prefill import GREEDY, PrefillChunk, pack, padded
from dflash.inference.request import PromptToken, Request, RequestSampling, check_request
from dflash.inference.shapes import Shapes
from dflash.models.decoder import Decoder

NUM_STOP_IDS = 8  # Default number of stop ids that a request may have.
NO_STOP = -1  # Pads the stop ids of a request.


class Engine:
    """Programs over one target and one drafter; holds their weights, but no sequence state."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        config: DecodeConfig,
        *,
        max_length: int,
        adaptive_blocks: bool = False,
        divide_rows: bool = True,
        num_stop_ids: int = NUM_STOP_IDS,
        revise: Revise | None = None,
    ):
        """Creates an engine; abstract models suffice to plan and to compile.

        Args:
          target: Target model; its weights are used in place.
          drafter: Drafter; its weights are used in place.
          config: Sizes of the loop and the verification rule. Sampling comes with each request.
          max_length: Length of the longest sequence in tokens, prompt and output together.
          adaptive_blocks: Choose the block size anew for every cycle, up to the drafter's.
          divide_rows: Let cycles of chosen block sizes divide their rows among sequences.
          num_stop_ids: Number of stop ids that a request may have.
          revise: Function that changes the result of every cycle, for measurements.
        """
        restorable = drafter.prefix_cache_mode != "never" and not target.has_recurrent_state
        self.prefix_cache = config.prefix_cache and restorable
        self.target, self.drafter, self.config = target, drafter, config
        self.sharding, self.num_stop_ids = target.sharding, num_stop_ids
        drafter = self._wrapped(drafter)
        self.layout = self._layout(drafter, max_length)
        # Confidence depends on the drawn tokens, so a rejection rule must not go by it.
        divides = divide_rows and config.verify == "coupled"
        options = {"adaptive": adaptive_blocks, "divides": divides, "exact": config.exact}
        choices = Choices.of(drafter, self.layout, **options)
        self.rules = Rules(choices, drafter.longest_context, config.verify, revise=revise)
        sizes = {"layout": self.layout, "rules": self.rules, "num_stop_ids": num_stop_ids}
        self.shapes = Shapes(target, drafter, config, **sizes)
        self._programs = program_table.Programs(self.shapes, program_table.TABLE)
        self.target_params, self.drafter_params = nnx.state(target), nnx.state(drafter)
        # Seconds per cycle by batch bucket, length and choice of rows, [W, 2, S], or by its last
        # axes only; see `ChosenRows`.
        self.cycle_seconds: np.typing.ArrayLike | None = None
        # Index of the choice that every cycle takes; None to choose by acceptance.
        self._forced = len(choices) - 1 if config.exact and not adaptive_blocks else None
        # Default constraints by number of sequences, created on the device once.
        self._unconstrained = functools.cache(lambda count: self.program("unconstrained", count)())
        self._learnt: Any = None  # What the last run learnt; see `retire`.

    def _layout(self, drafter: Drafter, max_length: int) -> Layout:
        config = self.config
        return Layout(
            batch_size=config.batch_size,
            max_length=max_length,
            block_size=exact_rows(drafter.block_size) if config.exact else drafter.block_size,
            page_size=config.page_size,
            prefill_chunk=config.prefill_chunk,
            num_replicas=self.sharding.size("pages"),
            growth=config.sync_every * drafter.longest_path,
            num_pages=config.num_pages,
            prefix_cache=self.prefix_cache,
            partial=config.partial_dispatches,
            window=self.target.window,
            exact=config.exact,
        )

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Rows that a cycle may verify per sequence, ascending."""
        return self.rules.block_sizes

    @property
    def vocab_size(self) -> int:
        """Number of the target's token ids."""
        return self.target.arch.vocab_size

    @property
    def is_greedy(self) -> bool:
        """Returns whether the config's sampling is greedy, without logit controls."""
        return controls.is_greedy(Request(0, (), 1, RequestSampling.from_config(self.config)))

    def has_room(self, max_length: int, num_stop_ids: int) -> bool:
        """Returns whether sequences of `max_length` tokens with `num_stop_ids` stop ids fit."""
        return max_length <= self.layout.max_length and num_stop_ids <= self.num_stop_ids

    def check(self, request: Request) -> None:
        """Raises InputError if this engine cannot decode a request."""
        check_request(
            request,
            max_length=self.layout.max_length,
            vocab_size=self.vocab_size,
            num_stop_ids=self.num_stop_ids,
            num_adapters=len(self.target.adapters),
        )

    # --- the four calls -------------------------------------------------------------------------

    def new_prefill_state(self) -> Any:
        """Returns the drafter's empty state of the prompts in prefill, one per data replica."""
        return self.program("new_prefill_state")()

    def prefill(
        self, state: DecodeState, prefill_state: Any, chunks: Mapping[int, PrefillChunk]
    ) -> tuple[DecodeState, Any, jax.Array, Logprobs]:
        """Runs the next chunk of the prompt in every prefill slot that has one.

        Consumes `state` and `prefill_state` (their buffers are donated).

        Args:
          state: State of the batch; its cache receives the target's rows.
          prefill_state: The drafter's state of the prompts in prefill.
          chunks: Chunks by prefill slot. Each uses slots and pages of its own replica only.
        Returns:
          The state; the prefill state; the token after each chunk, int32 [n], which is the prompt's
          next token or the target's sample, negative if its logits are not finite; and
          log-probabilities [n] of sampled tokens, if requested.
        Raises:
          ValueError: A chunk is empty or too long.
        """
        inputs, *of_prompts = self._prompt_inputs(chunks)
        weights = self.target_params, self.drafter_params
        run = self.program("prefill", inputs.tokens.shape[1])
        cache, *results = run(*weights, state.cache, prefill_state, inputs, *of_prompts)
        return dataclasses.replace(state, cache=cache), *results

    def _prompt_inputs(self, chunks: Mapping[int, PrefillChunk]) -> tuple:
        """Returns the next chunks, their constraints and their sampling."""
        inputs = pack(chunks, self.num_prefill_slots, self.layout)
        slots = range(self.num_prefill_slots)
        samplings = [chunks[slot].sampling if slot in chunks else GREEDY for slot in slots]
        params = jax.tree.map(lambda *rows: np.stack(rows), *map(SamplingParams.of, samplings))
        default = self._unconstrained(self.num_prefill_slots)
        rows = {slot: chunks[slot].constraints for slot in chunks if chunks[slot].constraints}
        return inputs, first_token.with_rows(default, rows), params

    def insert(
        self,
        state: DecodeState,
        prefill_state: Any,
        anchors: jax.Array,
        prefill_slot: int,
        slot: Slot,
        request: Request,
        output_ids: Sequence[int] = (),
    ) -> DecodeState:
        """Puts a prefilled sequence into a slot; consumes `state` (its buffers are donated).

        The device decides whether the sequence has already ended: its anchor may be a stop token,
        its last token, or invalid because logits were not finite.

        Args:
          state: State of the batch.
          prefill_state: The drafter's state, covering all tokens before the anchor.
          anchors: int32 [n]; result of the last `prefill` of these prompts.
          prefill_slot: Prefill slot of the sequence, that of the slot's replica.
          slot: Empty slot, with the pages that the next dispatch may fill.
          request: Request of the sequence; its limit and stop ids end the sequence.
          output_ids: Known output so far; empty for a new sequence, whose anchor the host does not
            know yet.
        Raises:
          ValueError: The slot has more pages than a sequence may own.
        """
        stop_ids = np.full(self.num_stop_ids, NO_STOP, np.int32)
        stop_ids[: len(set(request.stop_ids))] = sorted(set(request.stop_ids))
        where = (np.int32(prefill_slot), np.int32(slot.index))
        request_controls = self._unconstrained(1).controls
        if not controls.is_default(request):
            request_controls = controls.of_request(request, output_ids, self.layout.max_length)
            request_controls = jax.tree.map(lambda x: x[None], request_controls)
        length = len(request.prompt) + max(1, len(output_ids))
        of_request = (
            anchors, *where, self.page_row(slot), np.int32(length), np.int32(request.limit),
            stop_ids, request_controls, SamplingParams.of(request.sampling),
            np.int32(request.adapter) if self.target.adapters else None,
        )  # fmt: skip
        return self.program("insert")(state, prefill_state, *of_request)

    def admit(
        self, state: DecodeState, slot: Slot, request: Request, output_ids: Sequence[int] = ()
    ) -> DecodeState:
        """Prefills a whole prompt and inserts it into a slot, in one call; consumes `state`.

        Args:
          slot: Empty slot, with the pages that the next dispatch may fill.
          output_ids: Output so far, whose last token becomes the anchor; empty for a new sequence.
        Raises:
          ValueError: The prompt is empty or leaves no room for output, or the slot has more pages
            than a sequence may own.
        """
        layout = self.layout
        self.page_row(slot)  # Checks the pages.
        prefill_state, prefill_slot = self.new_prefill_state(), layout.replica_of(slot.index)
        token_ids = (*request.prompt, *output_ids)
        length = len(request.prompt) + max(len(output_ids) - 1, 0)
        if not 0 < length < layout.max_length:
            raise ValueError(f"prompt of {length} tokens, expected 1 to {layout.max_length - 1}")
        for start in range(0, length, layout.longest_chunk):
            end = min(start + layout.longest_chunk, length)
            options = {"fresh": not start, "adapter": request.adapter}
            chunk = PrefillChunk.of(token_ids, start, end, slot, request.sampling, **options)
            chunks = {prefill_slot: chunk}
            state, prefill_state, anchors, _ = self.prefill(state, prefill_state, chunks)
        where = anchors, prefill_slot, slot
        return self.insert(state, prefill_state, *where, request, output_ids)

    def generate(
        self,
        state: DecodeState,
        bucket: int | None = None,
        *,
        greedy: bool = False,
        max_idle: int = dispatch.ANY,
    ) -> tuple[DecodeState, Report]:
        """Runs up to sync_every cycles; consumes `state`.

        Args:
          bucket: Batch bucket, one of the layout's: only the first `bucket` slots of each replica
            are computed, and the others must be empty. None computes all slots.
          greedy: Each request in the batch `is_greedy`, see `controls`. A program without sampling
            and logit controls then suffices, which compiles sooner and starts sooner on a CPU.
          max_idle: End before slots would be idle for more cycles; see `dispatch.run_cycles`.
        """
        sizes = () if bucket in (None, self.layout.slots_per_replica) else (bucket,)
        run = self._programs.for_requests("generate", *sizes, greedy=greedy)
        return run(self.target_params, self.drafter_params, state, np.int32(max_idle))

    def draft(self, state: DecodeState) -> tuple[DecodeState, Proposal]:
        """Drafts for every slot, for `conclude` to verify; consumes `state`."""
        return self.program("draft")(self.target_params, self.drafter_params, state)

    def conclude(
        self, state: DecodeState, proposal: Proposal, allowed: np.ndarray, ready: np.ndarray
    ) -> tuple[DecodeState, Report]:
        """Runs a cycle that verifies a proposal under masks; consumes `state`.

        Args:
          state: State returned by `draft`.
          proposal: Proposal returned by `draft`.
          allowed: int32 [B, R, ceil(V / 32)]; allowed tokens, see `dispatch.conclude`.
          ready: bool [B]; constrained sequences whose masks are valid.
        """
        params = self.target_params, self.drafter_params
        return self.program("conclude")(*params, state, proposal, allowed, ready)

    def score(self, request: Request) -> tuple[PromptToken, ...]:
        """Returns the tokens of a prompt with their log-probabilities; none if not requested."""
        if request.prompt_logprobs is None:
            return ()
        of_prompt = self.target, self.target_params, request.prompt
        return prompt_logprobs.compute(*of_prompt, request.prompt_logprobs)

    def release(self, state: DecodeState, slot: int) -> DecodeState:
        """Empties a slot, so that its pages can be reused."""
        return state.with_occupancy(self.program("release")(state.occupancy, np.int32(slot)))

    def set_pages(self, state: DecodeState, slots: Sequence[Slot]) -> DecodeState:
        """Sets the pages of all slots, none for those not listed; consumes `state`."""
        table = np.zeros((self.layout.batch_size, self.layout.pages_per_sequence), np.int32)
        for slot in slots:
            table[slot.index] = self.page_row(slot)
        return self.program("set_pages")(state, table)

    def page_row(self, slot: Slot) -> np.ndarray:
        """Returns a slot's row of the page table, int32 [pages of the longest sequence]."""
        most = self.layout.pages_per_sequence
        if len(slot.pages) > most:
            raise ValueError(
                f"slot {slot.index} has {len(slot.pages)} pages; a sequence owns at most {most}"
            )
        return padded(slot.pages, most)

    # --- state ----------------------------------------------------------------------------------

    @property
    def num_prefill_slots(self) -> int:
        """Number of prompts that are prefilled at once, one per data replica."""
        return self.shapes.num_prefill_slots

    def new_state(self) -> DecodeState:
        """Returns a batch of empty slots."""
        state = self.program("new_state")(self._measured())
        if self._learnt is None:
            return state
        # A dispatch donates its state, and other runs may start with the same.
        of_rows, of_drafter = jax.tree.map(jnp.copy, self._learnt)
        return dataclasses.replace(
            state,
            choice=state.choice.with_learnt(of_rows),
            drafter=self.shapes.drafter.with_learnt(state.drafter, of_drafter),
        )

    def retire(self, state: DecodeState) -> None:
        """Keeps what a run has learnt about acceptance, with which the next run starts."""
        self._learnt = state.choice.learnt, self.shapes.drafter.learnt(state.drafter)

    def program(self, kind: str, *sizes: int) -> jax.stages.Compiled:
        """Returns the compiled program of this name; compiles it at the first call."""
        return self._programs.get(kind, *sizes)

    def add_program(self, name: str, function: Callable) -> None:
        """Adds a program over the models and the state; it is compiled at its first `run`.

        Args:
          name: Name for `run`.
          function: Function (target, drafter, state) -> any pytree. A DecodeState in the result is
            placed as the state is, and everything else is replicated. If there is one, the program
            consumes its input.
        """
        self._programs.add(name, function)

    def run(self, name: str, state: DecodeState) -> Any:
        """Runs an added program on a state; see `add_program`."""
        return self.program(name)(self.target_params, self.drafter_params, state)

    def update_weights(self, tree: Any, *, lora_alpha: float | None = None) -> None:
        """Replaces the target's weights, for every engine over it; see `weight_update.update`.

        Schedulers hold caches of the old weights: call `Scheduler.restart`.
        """
        weight_update.update(self.target, tree, lora_alpha=lora_alpha)

    def set_drafter(self, drafter: Drafter) -> None:
        """Replaces the drafter's weights, compiling nothing; raises ValueError if shapes differ."""
        params = nnx.state(self._wrapped(drafter))
        both = params, self.drafter_params
        form, present = (jax.tree.map(lambda x: (x.shape, x.dtype), each) for each in both)
        if form != present:
            raise ValueError("the drafter's weights differ in shape or dtype from those before")
        self.drafter_params = params

    def with_drafter(self, drafter: Drafter) -> "Engine | None":
        """Returns an engine with another drafter and these programs; None if they do not fit it."""
        if nnx.graphdef(drafter) != nnx.graphdef(self.drafter):
            return None
        twin = copy.copy(self)
        try:
            twin.set_drafter(drafter)
        except ValueError:
            return None
        twin.drafter, twin._learnt = drafter, None
        return twin

    def compile(
        self,
        prompt_lengths: Iterable[int],
        progress: Callable[[int, int], None] = lambda ready, total: None,
        *,
        grammars: bool = False,
        greedy: bool = False,
    ) -> None:
        """Compiles every missing program that prompts of these lengths need.

        Args:
          prompt_lengths: Lengths in tokens.
          progress: Called with the numbers of programs that are ready and of all, as they change.
          grammars: Include the programs of sequences with grammars.
          greedy: Compile only the programs for greedy requests; see `generate`.
        """
        names = self.program_names(prompt_lengths, grammars=grammars, greedy=greedy)
        self._programs.compile_all(self._programs.missing(names), progress)

    @property
    def must_time_cycles(self) -> bool:
        """Returns whether a choice needs times of cycles that are not known; see `time_cycles`."""
        is_chosen = self._forced is None and len(self.rules.choices) > 1
        return is_chosen and self.cycle_seconds is None

    def time_cycles(self) -> None:
        """Measures cycles of each number of rows, unless that was done or there is no choice."""
        self._measured()

    def program_names(self, prompt_lengths: Iterable[int], **needs: bool) -> list[tuple]:
        """Returns the names of the programs that prompts need; see `compile`."""
        return program_table.names(self.shapes, prompt_lengths, **needs)

    def abstract_state(self) -> DecodeState:
        """Returns the shapes, dtypes and shardings of the state, without allocating it."""
        return self.shapes.state()

    def beside(self) -> tuple[int, dict[str, Any]]:
        """Returns the number of devices of a drafter apart, and abstract arrays on them by kind."""
        return 0, {}

    def decode_plainly(self) -> None:
        """Lets every cycle commit one token, without drafts; the engine needs a choice of sizes.

        An exact engine then decodes plainly by the programs that also draft and verify.
        """
        self._forced = choice.PLAIN

    def _wrapped(self, drafter: Drafter) -> Drafter:
        if drafter.windows:
            drafter = ChosenWindow(drafter, self.target.sharding)
        if self.config.lookup and drafter.num_draft_tokens:
            drafter = WithCopies(drafter, self.target.sharding)
        return drafter

    def _measured(self) -> np.ndarray:
        """Returns times of cycles, float32 [W, 2, S], see `ChosenRows`; 1 if the size is fixed."""
        if self.must_time_cycles:
            generate = functools.partial(self.generate, greedy=self.is_greedy)
            self.cycle_seconds = timing.measure(self.shapes, self.program, generate)
        seconds = 1.0 if self.cycle_seconds is None else self.cycle_seconds
        if self._forced is not None:
            seconds = timing.only(self._forced, len(self.rules.choices))
        return np.broadcast_to(np.asarray(seconds, np.float32), self.shapes.seconds().shape)
