"""The engine: four calls on device state that every way of decoding is made of.

    prefill(prompt, sampling) -> prefix
    insert(state, prefix, slot, request, anchor) -> state
    generate(state) -> state, report          one dispatch of up to sync_every cycles
    release(state, slot) -> state

How a sequence samples, when it stops and how long it gets are device state, so one set of programs
serves all requests. Every shape is static: there is one prefill and one insert per prompt bucket,
and one generate. `compile` builds them ahead of time; nothing compiles inside a measured call.
"""

import concurrent.futures
import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from dflash import errors
from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter
from dflash.inference import adaptive, block_choice, broken, controls, cycle, first_token, timing
from dflash.inference.controls import Controls
from dflash.inference.pages import Layout, Slot
from dflash.inference.programs import Programs
from dflash.inference.request import Request, Sampling, check_request
from dflash.inference.state import DecodeState, Prefix, Report
from dflash.models.decoder import Decoder

GREEDY = Sampling()
NUM_STOP_IDS = 8  # that a request may have, unless an engine is built for more
_MAX_THREADS = 4  # that compile at once
NO_TOKEN = -1  # fills up the stop ids of a request that has fewer


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
          revise: changes the verdict of every cycle; for measurements.
          prefix_cache: in place of the config's `decode.prefix_cache`, unless None.
        """
        self.prefix_cache = config.prefix_cache if prefix_cache is None else prefix_cache
        if self.prefix_cache:
            raise errors.ConfigError("decode.prefix_cache: not available yet; set it to false")
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
            num_shares=self.sharding.size("pages"),
            growth=config.sync_every * drafter.longest_path,
            num_pages=config.num_pages,
        )
        self.num_stop_ids = num_stop_ids
        self._programs = Programs(
            target,
            drafter,
            config,
            layout=self.layout,
            rules=self.rules,
            num_stop_ids=num_stop_ids,
        )
        self._target_params = nnx.state(target)
        self._drafter_params = nnx.state(drafter)
        # Of each block size, in seconds; measured by `compile` where there is a choice.
        self.cycle_seconds: tuple[float, ...] | None = None
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

    def prefill(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        asked: Controls | None = None,
        allowed: np.ndarray | None = None,
    ) -> Prefix:
        """Runs a prompt and draws its first new token.

        Args:
          prompt: token ids, at least one.
          sampling: how the sequence draws its tokens.
          asked: what shapes its logits, as `controls.of_request` has it; None: nothing.
          allowed: mask of the first token; see `first_token.allowed_first`. None: all.
        Raises:
          ValueError: the prompt is empty, or leaves no room for a new token.
        """
        if not 0 < len(prompt) < self.layout.max_length:
            raise ValueError(
                f"prompt of {len(prompt)} tokens, expected 1 to {self.layout.max_length - 1}"
            )
        bucket = self.layout.bucket(len(prompt))
        chunk = self.layout.chunk(bucket)
        plain = Request(0, tuple(prompt), 1, sampling)
        asked = asked or controls.of_request(plain, (), self.layout.max_length)
        allowed = first_token.allow_all(self.vocab_size) if allowed is None else allowed
        prefix = self.program("new_prefix", bucket)(asked, allowed, *sampling.scalars())
        run = self.program("prefill", bucket)
        for start in range(0, len(prompt), chunk):
            piece = np.zeros((1, chunk), np.int32)
            part = prompt[start : start + chunk]
            piece[0, : len(part)] = part
            following = prompt[start + chunk] if start + chunk < len(prompt) else -1
            prefix = run(
                self._target_params,
                self._drafter_params,
                prefix,
                piece,
                np.int32(len(part)),
                np.int32(following),
            )
        return prefix

    def explain(self, request: Request, said: Sequence[int]) -> errors.NumericsError:
        """The error of a sequence whose next logits are not finite, after finding the layer.

        Args:
          request: the sequence.
          said: its output so far.
        """
        tokens = (*request.prompt, *said)
        bucket = self.layout.bucket(len(tokens))
        chunk, sound = self.layout.chunk(bucket), True
        try:
            asked = controls.of_request(request, (), self.layout.max_length)
            allowed = first_token.allow_all(self.vocab_size)
            scalars = request.sampling.scalars()
            cache = self.program("new_prefix", bucket)(asked, allowed, *scalars).cache
            run = self.program("examine", bucket)
            for start in range(0, len(tokens), chunk):
                piece = np.zeros((1, chunk), np.int32)
                part = tokens[start : start + chunk]
                piece[0, : len(part)] = part
                where = np.int32(start), np.int32(len(part))
                cache, found = run(self._target_params, cache, piece, *where)
                sound = sound & jax.device_get(found)
        except jax.errors.JaxRuntimeError:
            sound = None
        return broken.error(self.target, request, said, sound)

    def insert(
        self, state: DecodeState, prefix: Prefix, slot: Slot, request: Request, anchor: int
    ) -> DecodeState:
        """Puts a prefilled sequence into a slot; consumes `state` (its buffers are donated).

        Args:
          state: the batch.
          prefix: of everything before the anchor.
          slot: must be empty, and own the pages that the next dispatch may fill.
          request: its limit and stop ids end the sequence.
          anchor: the sequence's last committed token: the one that the prefill has drawn, or, for a
            sequence that comes back after a preemption, the one that it had drawn before.
        Raises:
          ValueError: the slot has more pages than a sequence may own.
        """
        table = self._page_row(slot)
        # The bucket's padding may fill more pages than the sequence owns: those go to scratch.
        pages = np.zeros(self.layout.prefix_pages(prefix.bucket), np.int32)
        owned = min(len(pages), len(slot.pages))
        pages[:owned] = slot.pages[:owned]
        stop_ids = np.full(self.num_stop_ids, NO_TOKEN, np.int32)
        stop_ids[: len(set(request.stop_ids))] = sorted(set(request.stop_ids))
        return self.program("insert", prefix.bucket)(
            state,
            prefix,
            np.int32(slot.index),
            table,
            pages,
            np.int32(request.limit),
            stop_ids,
            np.int32(anchor),
        )

    def generate(self, state: DecodeState) -> tuple[DecodeState, Report]:
        """Runs up to sync_every cycles; consumes `state` (its buffers are donated)."""
        return self.run("generate", state)

    def release(self, state: DecodeState, slot: int) -> DecodeState:
        """Takes a slot's pages from it, so that they may be handed out again."""
        return self.program("release")(state, np.int32(slot))

    def set_pages(self, state: DecodeState, slots: Sequence[Slot]) -> DecodeState:
        """Gives slots the pages that they own now; slots that are not named own none.

        Consumes `state` (its buffers are donated).
        """
        table = np.zeros((self.layout.batch_size, self.layout.pages_per_sequence), np.int32)
        for slot in slots:
            table[slot.index] = self._page_row(slot)
        return self.program("set_pages")(state, table)

    def _page_row(self, slot: Slot) -> np.ndarray:
        """A slot's row of the page table, int32 [pages of the longest sequence]."""
        most = self.layout.pages_per_sequence
        if len(slot.pages) > most:
            raise ValueError(
                f"slot {slot.index} has {len(slot.pages)} pages; a sequence owns at most {most}"
            )
        row = np.zeros(most, np.int32)
        row[: len(slot.pages)] = slot.pages
        return row

    def new_state(self) -> DecodeState:
        """A batch of empty slots."""
        state = self.program("new_state")(np.array(self._measured(), np.float32))
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
        return self.program(name)(self._target_params, self._drafter_params, state)

    def set_drafter(self, drafter: Drafter) -> None:
        """Takes other weights for the drafter; nothing is compiled again.

        Raises:
          ValueError: it is not built as the one before.
        """
        params = nnx.state(drafter)
        if _shapes(params) != _shapes(self._drafter_params):
            raise ValueError("the drafter's weights differ in shape or dtype from those before")
        self._drafter_params = params

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
    ) -> None:
        """Compiles every program that prompts of these lengths need, and that is not there yet.

        Args:
          prompt_lengths: in tokens.
          progress: called before the first and after each program with how many are ready, and
            how many there are to compile.
        """
        names = self._programs.missing(prompt_lengths)
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
        return self._programs.names(prompt_lengths)

    def abstract_state(self) -> DecodeState:
        """Shapes, dtypes and shardings of the state, without its memory."""
        return self._programs.abstract_state()

    def _measured(self) -> tuple[float, ...]:
        """Seconds of a cycle of each block size, measured at the first call; 1 for a single one."""
        if self.cycle_seconds is None and len(self.block_sizes) > 1:
            state = self.program("new_state")(adaptive.only(0, self.block_sizes))
            self.cycle_seconds = timing.cycle_seconds(
                self.block_sizes, state, self.program("occupied"), self.generate
            )
        return self.cycle_seconds or (1.0,)


def _shapes(params) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), params)
