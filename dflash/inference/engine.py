"""The engine: four calls on device state that every way of decoding is made of.

    prefill(prompt) -> prefix
    insert(state, prefix, slot) -> state
    generate(state) -> state, report          one dispatch of up to sync_every cycles
    release(state, slot) -> state

Every shape is static, so programs are few: one prefill and one insert per prompt bucket, one
generate. `compile` builds them ahead of time; nothing compiles inside a measured call.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter
from dflash.inference import adaptive, block_choice, cycle, timing
from dflash.inference.lowering import loop_options, lower
from dflash.inference.pages import Layout
from dflash.inference.prefill import prefill_chunk
from dflash.inference.sampling import SamplingParams, sequence_params
from dflash.inference.state import DecodeState, Prefix, Report
from dflash.layers.linear import matmul_precision
from dflash.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in the batch, and the pages that its sequence owns."""

    index: int
    pages: tuple[int, ...]


class Engine:
    """Decodes with one target and one drafter; holds weights and programs, no sequence state."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        config: DecodeConfig,
        *,
        max_length: int,
        stop_ids: Sequence[int] = (),
    ):
        """Takes the models as they are; abstract ones serve to plan and to compile.

        Args:
          target: its weights are used in place.
          drafter: likewise.
          config: sampling and loop options.
          max_length: longest sequence in tokens, prompt and output together.
          stop_ids: tokens that end a sequence.
        """
        self.sharding = target.sharding
        self.layout = Layout(
            batch_size=config.batch_size,
            max_length=max_length,
            block_size=drafter.block_size,
            page_size=config.page_size,
            prefill_chunk=config.prefill_chunk,
            num_shares=self.sharding.size("pages"),
        )
        self._config = config
        self._rules = cycle.Rules(
            rejection=config.verify == "rejection", stop_ids=tuple(sorted(set(stop_ids)))
        )
        self._target, self._target_params = nnx.split(target)
        self._drafter, self._drafter_params = nnx.split(drafter)
        self._abstract_target, self._abstract_drafter = target, drafter
        self._programs: dict[tuple, Any] = {}
        self.block_sizes = adaptive.block_sizes(drafter)
        # Of each block size, in seconds; measured by `compile` where there is a choice.
        self.cycle_seconds: tuple[float, ...] | None = None
        # What earlier runs found out about drafts, where there is a choice; see `retire`.
        self._known: block_choice.Pool | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return self._rules.stop_ids

    @property
    def vocab_size(self) -> int:
        """Token ids of the target."""
        return self._abstract_target.arch.vocab_size

    # --- the four calls -------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int], index: int = 0) -> Prefix:
        """Runs a prompt and draws its first new token.

        Args:
          prompt: token ids, at least one.
          index: number of the sequence in its run; with the seed it fixes the sequence's noise.
        Raises:
          ValueError: the prompt is empty, or leaves no room for a new token.
        """
        if not 0 < len(prompt) < self.layout.max_length:
            raise ValueError(
                f"prompt of {len(prompt)} tokens, expected 1 to {self.layout.max_length - 1}"
            )
        bucket = self.layout.bucket(len(prompt))
        chunk = self.layout.chunk(bucket)
        config = self._config
        prefix = self.program("new_prefix", bucket)(
            np.int32(index),
            np.uint32(config.seed),
            np.float32(config.temperature),
            np.int32(config.top_k),
            np.float32(config.top_p),
        )
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

    def insert(self, state: DecodeState, prefix: Prefix, slot: Slot, limit: int) -> DecodeState:
        """Puts a prefilled sequence into a slot; it ends at `limit` tokens, prompt included.

        Consumes `state` (its buffers are donated).

        Raises:
          ValueError: the slot has not the pages that `limit` tokens take, or too many.
        """
        needed, most = self.layout.pages_for(limit), self.layout.pages_per_sequence
        if not needed <= len(slot.pages) <= most:
            raise ValueError(
                f"slot {slot.index} has {len(slot.pages)} pages; {limit} tokens take {needed}, "
                f"a sequence at most {most}"
            )
        table = np.zeros(self.layout.pages_per_sequence, np.int32)
        table[: len(slot.pages)] = slot.pages
        # The bucket's padding may fill more pages than the sequence owns: those go to scratch.
        pages = np.zeros(self.layout.prefix_pages(prefix.bucket), np.int32)
        owned = min(len(pages), len(slot.pages))
        pages[:owned] = slot.pages[:owned]
        return self.program("insert", prefix.bucket)(
            state, prefix, np.int32(slot.index), table, pages, np.int32(limit)
        )

    def generate(self, state: DecodeState) -> tuple[DecodeState, Report]:
        """Runs up to sync_every cycles; consumes `state` (its buffers are donated)."""
        return self.program("generate")(self._target_params, self._drafter_params, state)

    def release(self, state: DecodeState, slot: int) -> DecodeState:
        """Takes a slot's pages from it, so that they may be handed out again."""
        return self.program("release")(state, np.int32(slot))

    def new_state(self) -> DecodeState:
        """A batch of empty slots."""
        state = self.program("new_state")(np.array(self._measured(), np.float32))
        return dataclasses.replace(state, adaptive=adaptive.with_pool(state.adaptive, self._known))

    def retire(self, state: DecodeState) -> None:
        """Ends a run: what it taught about block sizes, the next one begins with."""
        if state.adaptive is not None:
            self._known = block_choice.pool(state.adaptive.choice)

    # --- ahead of time --------------------------------------------------------------------------

    def compile(
        self,
        prompt_lengths: Iterable[int],
        progress: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        """Compiles every program that prompts of these lengths need.

        Args:
          prompt_lengths: in tokens.
          progress: told the name of each program and the seconds it took.
        """
        for key in self.program_names(prompt_lengths):
            begin = time.perf_counter()
            self.program(*key)
            progress(" ".join(map(str, key)), time.perf_counter() - begin)
        self._measured()

    def program_names(self, prompt_lengths: Iterable[int]) -> list[tuple]:
        """Names of the programs that prompts of these lengths (in tokens) need."""
        buckets = sorted({self.layout.bucket(length) for length in prompt_lengths})
        per_bucket = [
            (kind, bucket) for bucket in buckets for kind in ("new_prefix", "prefill", "insert")
        ]
        timed = [("occupied",)] if len(self.block_sizes) > 1 else []
        return [("new_state",), *per_bucket, ("generate",), ("release",), *timed]

    def abstract_state(self) -> DecodeState:
        """Shapes, dtypes and shardings of the state, without its memory."""
        layout, target, drafter = self.layout, self._abstract_target, self._abstract_drafter
        batch = layout.batch_size
        ints = self.sharding.abstract((batch,), ("batch",), jnp.int32)
        return DecodeState(
            length=ints,
            limit=ints,
            anchor=ints,
            active=self.sharding.abstract((batch,), ("batch",), jnp.bool_),
            sampling=self._abstract_sampling(batch, "batch"),
            cache=target.new_cache(
                batch=batch,
                pages_per_sequence=layout.pages_per_sequence,
                num_pages=layout.pages_per_share * layout.num_shares,
                page_size=layout.page_size,
                kv_dtype=self._config.kv_dtype,
            ),
            drafter=drafter.init_state(batch, layout.capacity + adaptive.spare_rows(drafter)),
            adaptive=adaptive.abstract(
                drafter, batch, target.arch.hidden_size, target.dtype, self.sharding
            ),
        )

    def _measured(self) -> tuple[float, ...]:
        """Seconds of a cycle of each block size, measured now if nobody did; 1 for a single one."""
        if self.cycle_seconds is None and len(self.block_sizes) > 1:
            state = self.program("new_state")(adaptive.only(0, self.block_sizes))
            self.cycle_seconds = timing.cycle_seconds(
                self.block_sizes, state, self.program("occupied"), self.generate
            )
        return self.cycle_seconds or (1.0,)

    # --- programs -------------------------------------------------------------------------------

    def program(self, kind: str, *key: int):
        """The compiled program of this name, compiled now if nobody asked for it before."""
        if (kind, *key) not in self._programs:
            with jax.default_matmul_precision(matmul_precision(self._abstract_target.dtype)):
                self._programs[(kind, *key)] = getattr(self, f"_compile_{kind}")(*key)
        return self._programs[(kind, *key)]

    def _compile_new_state(self):
        abstract = self.abstract_state()

        def new_state(seconds):
            state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
            # An empty slot counts as one token long: its rows go to the scratch page's start.
            chooser = adaptive.with_seconds(state.adaptive, seconds)
            length = jnp.ones_like(state.length)
            return dataclasses.replace(state, length=length, adaptive=chooser)

        return lower(new_state, self._seconds(), out=abstract)

    def _compile_occupied(self):
        state = self.abstract_state()
        occupy = functools.partial(timing.occupy, layout=self.layout, config=self._config)
        return lower(occupy, state, self._seconds(), out=state, donate=(0,))

    def _compile_generate(self):
        state = self.abstract_state()

        def generate(target_params, drafter_params, state):
            return cycle.run_cycles(
                nnx.merge(self._target, target_params),
                nnx.merge(self._drafter, drafter_params),
                state,
                max_cycles=self._config.sync_every,
                rules=self._rules,
            )

        report = jax.eval_shape(generate, self._target_params, self._drafter_params, state)[1]
        report = jax.tree.map(self._replicated, report)
        options = loop_options(self.sharding, self._abstract_target.dtype)
        return lower(
            generate, self._target_params, self._drafter_params, state,
            out=(state, report), donate=(2,), options=options,
        )  # fmt: skip

    def _compile_release(self):
        state = self.abstract_state()

        def release(state, slot):
            table = state.cache.page_table.at[slot].set(0)
            return dataclasses.replace(
                state,
                length=state.length.at[slot].set(1),
                active=state.active.at[slot].set(False),
                cache=dataclasses.replace(state.cache, page_table=table),
            )

        return lower(release, state, self._scalar(), out=state, donate=(0,))

    def _compile_new_prefix(self, bucket: int):
        abstract = self._abstract_prefix(bucket)

        def new_prefix(index, *sampling):
            prefix = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
            table = jnp.arange(1, prefix.cache.page_table.shape[1] + 1, dtype=jnp.int32)[None]
            cache = dataclasses.replace(prefix.cache, page_table=table)
            params = sequence_params(index, *sampling)
            return dataclasses.replace(prefix, cache=cache, sampling=params)

        scalars = [self._scalar(t) for t in ("int32", "uint32", "float32", "int32", "float32")]
        return lower(new_prefix, *scalars, out=abstract)

    def _compile_prefill(self, bucket: int):
        abstract = self._abstract_prefix(bucket)
        tokens = self._whole((1, self.layout.chunk(bucket)), jnp.int32)

        def prefill(target_params, drafter_params, prefix, tokens, count, following):
            target = nnx.merge(self._target, target_params)
            drafter = nnx.merge(self._drafter, drafter_params)
            return prefill_chunk(target, drafter, prefix, tokens, count, following)

        return lower(
            prefill, self._target_params, self._drafter_params, abstract, tokens,
            self._scalar(), self._scalar(), out=abstract, donate=(2,),
        )  # fmt: skip

    def _compile_insert(self, bucket: int):
        state, prefix = self.abstract_state(), self._abstract_prefix(bucket)
        table = self._whole((self.layout.pages_per_sequence,), jnp.int32)
        pages = self._whole((self.layout.prefix_pages(bucket),), jnp.int32)

        def insert(state, prefix, slot, table, pages, limit):
            length = prefix.length[0] + 1
            anchor = prefix.anchor[0]
            return DecodeState(
                length=state.length.at[slot].set(length),
                limit=state.limit.at[slot].set(limit),
                anchor=state.anchor.at[slot].set(anchor),
                active=state.active.at[slot].set((length < limit) & ~self._rules.is_stop(anchor)),
                sampling=jax.tree.map(
                    lambda batch, one: batch.at[slot].set(one[0]), state.sampling, prefix.sampling
                ),
                cache=state.cache.insert(
                    prefix.cache, slot, self.layout.share_of(slot), table, pages, self.sharding
                ),
                drafter=self._abstract_drafter.insert(state.drafter, prefix.drafter, slot),
                adaptive=state.adaptive and state.adaptive.insert(slot),
            )

        return lower(
            insert, state, prefix, self._scalar(), table, pages, self._scalar(),
            out=state, donate=(0,),
        )  # fmt: skip

    # --- shapes ---------------------------------------------------------------------------------

    def _abstract_prefix(self, bucket: int) -> Prefix:
        pages = self.layout.prefix_pages(bucket)
        one = self._whole((1,), jnp.int32)
        return Prefix(
            length=one,
            anchor=one,
            sampling=self._abstract_sampling(1, None),
            cache=self._abstract_target.new_cache(
                batch=1,
                pages_per_sequence=pages,
                num_pages=pages + 1,
                page_size=self.layout.page_size,
                kv_dtype=self._config.kv_dtype,
            ),
            drafter=self._abstract_drafter.init_state(1, bucket),
            bucket=bucket,
        )

    def _abstract_sampling(self, batch: int, name: str | None) -> SamplingParams:
        floats = self.sharding.abstract((batch,), (name,), jnp.float32)
        return SamplingParams(
            seed=self.sharding.abstract((batch, 2), (name, None), jnp.uint32),
            temperature=floats,
            top_k=self.sharding.abstract((batch,), (name,), jnp.int32),
            top_p=floats,
        )

    def _seconds(self) -> jax.ShapeDtypeStruct:
        return self._whole((len(self.block_sizes),), jnp.float32)

    def _replicated(self, x) -> jax.ShapeDtypeStruct:
        return self._whole(x.shape, x.dtype)

    def _whole(self, shape, dtype) -> jax.ShapeDtypeStruct:
        return self.sharding.abstract(shape, (None,) * len(shape), dtype)

    def _scalar(self, dtype="int32") -> jax.ShapeDtypeStruct:
        return self._whole((), dtype)
