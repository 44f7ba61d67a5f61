"""The engine's programs: compiled ahead of time, each for shapes that are known beforehand."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.inference import (
    adaptive,
    batch_buckets,
    controls,
    cycle,
    dispatch,
    first_token,
    logprobs,
    nonfinite,
    timing,
)
from dflash.inference.context_programs import ContextPrograms
from dflash.inference.lowering import lower, zeros
from dflash.inference.pages import Layout
from dflash.inference.prefill import ChunkInputs, prefill_chunk
from dflash.inference.request import Sampling
from dflash.inference.sampling import SamplingParams
from dflash.inference.state import DecodeState
from dflash.layers.linear import matmul_precision
from dflash.models.decoder import Decoder
from dflash.parallel.compiler_options import loop_options


class Programs(ContextPrograms):
    """Programs over one target and one drafter, by name; compiled when first asked for."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        config: DecodeConfig,
        *,
        layout: Layout,
        rules: cycle.Rules,
        num_stop_ids: int,
    ):
        """Takes the models for their shapes and places; their weights are arguments of programs."""
        self.target, self.drafter, self.config = target, drafter, config
        self.layout, self.rules, self.num_stop_ids = layout, rules, num_stop_ids
        self.sharding = target.sharding
        self._target_graph, target_weights = nnx.split(target)
        self._drafter_graph, drafter_weights = nnx.split(drafter)
        # Shapes and places only: the engine may take other weights.
        self._weights = _abstract(target_weights), _abstract(drafter_weights)
        self._functions: dict[str, Callable] = {}
        self._compiled: dict[tuple, Any] = {}

    def add(self, name: str, function: Callable) -> None:
        """See `Engine.add_program`."""
        self._functions[name] = function

    def get(self, kind: str, *key: int):
        """The compiled program of this name."""
        if (kind, *key) not in self._compiled:
            build = getattr(self, f"_compile_{kind}", None)
            if kind in self._functions:
                build = functools.partial(self._compile_added, self._functions[kind])
            with jax.default_matmul_precision(matmul_precision(self.target.dtype)):
                self._compiled[(kind, *key)] = build(*key)
        return self._compiled[(kind, *key)]

    def names(self, prompt_lengths: Iterable[int], *, grammars: bool = False) -> list[tuple]:
        """Names of the programs that prompts of these lengths (in tokens) need.

        Args:
          prompt_lengths: of the prompts.
          grammars: also those that sequences with grammars need.
        """
        chunks = self.layout.chunks(prompt_lengths)
        names = [("new_state",), ("new_lanes",), *(("prefill", rows) for rows in chunks)]
        names += [("plain", lanes) for lanes in sorted({1, self.num_lanes})]
        names += [("insert",), ("generate",), ("release",)]
        names += [("generate", width) for width in self.layout.widths[:-1]]
        if grammars:
            names += [("draft",), ("conclude",)]
        if self.layout.overcommits:
            names.append(("set_pages",))
        if self.keeps_rows:
            names += [("new_context",), ("store",), ("restore",)]
        if self.replays:
            names += [("replay", rows) for rows in chunks]
        if len(self.rules.block_sizes) > 1:
            names.append(("occupied",))
        return names

    def missing(self, prompt_lengths: Iterable[int], *, grammars: bool = False) -> list[tuple]:
        """Those of these `names` that are not compiled yet."""
        names = self.names(prompt_lengths, grammars=grammars)
        return [name for name in names if name not in self._compiled]

    def abstract_state(self, width: int | None = None) -> DecodeState:
        """Shapes, dtypes and shardings of the state, without its memory.

        Args:
          width: slots of each share; None: all. The pool of pages is the same.
        """
        layout, target, drafter = self.layout, self.target, self.drafter
        sizes = self.rules.block_sizes
        batch = (width or layout.slots_per_replica) * layout.num_replicas
        ints = self.sharding.abstract((batch,), ("batch",), jnp.int32)
        return DecodeState(
            length=ints,
            limit=ints,
            anchor=ints,
            active=self.sharding.abstract((batch,), ("batch",), jnp.bool_),
            stop_ids=self.sharding.abstract((batch, self.num_stop_ids), ("batch", None), jnp.int32),
            sampling=self._abstract_sampling(batch, "batch"),
            controls=controls.abstract(batch, "batch", layout.max_length, self.sharding),
            cache=target.new_cache(
                batch=batch,
                pages_per_sequence=layout.pages_per_sequence,
                num_pages=layout.pages_per_replica * layout.num_replicas,
                page_size=layout.page_size,
                kv_dtype=self.config.kv_dtype,
            ),
            drafter=self._abstract_drafter(batch),
            adaptive=adaptive.abstract(
                sizes,
                batch,
                len(drafter.feature_layers) * target.arch.hidden_size,
                target.dtype,
                self.sharding,
                len(layout.widths),
            ),
            nonfinite_at=ints,
            concluded=self._scalar(),
        )

    # --- over the models and the state ----------------------------------------------------------

    def _compile_generate(self, width: int | None = None):
        """A dispatch over the first `width` slots of each share; None: over all of them."""
        entry = self.layout.widths.index(width or self.layout.slots_per_replica)

        def generate(target, drafter, state):
            if state.adaptive is not None:
                state = dataclasses.replace(state, adaptive=state.adaptive.at_width(entry))
            return dispatch.run_cycles(
                target, drafter, state, max_cycles=self.config.sync_every, rules=self.rules
            )

        if width is not None:
            first = self.abstract_state(width)
            generate = batch_buckets.over_first_slots(generate, first, self.layout.num_replicas)
        return self._compile_added(generate)

    def _compile_added(self, function: Callable):
        state = self.abstract_state()
        inputs = *self._weights, state

        program = self._over_models(function)

        def place(result):
            return state if _is_state(result) else self._replicated(result)

        results = jax.eval_shape(program, *inputs)
        consumes = any(map(_is_state, jax.tree.leaves(results, is_leaf=_is_state)))
        return lower(
            program,
            *inputs,
            out=jax.tree.map(place, results, is_leaf=_is_state),
            donate=(2,) if consumes else (),
            options=loop_options(self.sharding, self.target.dtype),
        )

    # --- grammars -------------------------------------------------------------------------------

    def _compile_draft(self):
        state = self.abstract_state()
        run = self._over_models(functools.partial(dispatch.propose, rules=self.rules))
        return lower(
            run, *self._weights, state, out=(state, self._abstract_proposal()), donate=(2,)
        )

    def _compile_conclude(self):
        state, layout = self.abstract_state(), self.layout
        words = first_token.num_words(self.target.arch.vocab_size)
        run = self._over_models(functools.partial(dispatch.conclude, rules=self.rules))
        proposal = self._abstract_proposal()
        allowed = self._whole((layout.batch_size, layout.block_size, words), jnp.int32)
        ready = self._whole((layout.batch_size,), jnp.bool_)
        inputs = *self._weights, state, proposal, allowed, ready
        _, report = jax.eval_shape(run, *inputs)
        return lower(
            run, *inputs, out=(state, jax.tree.map(self._replicated, report)), donate=(2,),
            options=loop_options(self.sharding, self.target.dtype),
        )  # fmt: skip

    def _over_models(self, function: Callable) -> Callable:
        """The function of (target, drafter, …) over their weights."""

        def program(target_params, drafter_params, *args):
            target = nnx.merge(self._target_graph, target_params)
            return function(target, nnx.merge(self._drafter_graph, drafter_params), *args)

        return program

    def _abstract_proposal(self) -> Proposal:
        """Tokens on every device, for the host to read; probabilities where the target's are."""
        run = self._over_models(functools.partial(dispatch.propose, rules=self.rules))
        _, found = jax.eval_shape(run, *self._weights, self.abstract_state())
        probs = found.probs
        if probs is not None:
            probs = self.sharding.abstract(probs.shape, ("batch", None, "vocab"), probs.dtype)
        found = dataclasses.replace(found, probs=None)
        return dataclasses.replace(jax.tree.map(self._replicated, found), probs=probs)

    # --- over the state -------------------------------------------------------------------------

    def _compile_new_state(self):
        abstract = self.abstract_state()

        def new_state(seconds):
            state = zeros(abstract)
            # An empty slot has a length of 1: its rows go to the start of the scratch page.
            chooser = adaptive.with_seconds(state.adaptive, seconds)
            length = jnp.ones_like(state.length)
            plain = controls.plain(self.layout.batch_size, self.layout.max_length)
            return dataclasses.replace(
                state,
                length=length,
                controls=jax.tree.map(jnp.asarray, plain),
                adaptive=chooser,
            )

        return lower(new_state, self._seconds(), out=abstract)

    def _compile_occupied(self):
        state = self.abstract_state()
        sampling = Sampling.from_config(self.config)
        occupy = functools.partial(
            timing.occupy,
            layout=self.layout,
            sampling=sampling,
            vocab_size=self.target.arch.vocab_size,
        )
        return lower(occupy, state, self._seconds(), out=state, donate=(0,))

    def _compile_release(self):
        state = self.abstract_state()

        def release(state, slot):
            table = state.cache.page_table.at[slot].set(0)
            # An empty slot is greedy, so that a batch of greedy sequences skips all noise.
            temperature = state.sampling.temperature.at[slot].set(0)
            return dataclasses.replace(
                state,
                length=state.length.at[slot].set(1),
                active=state.active.at[slot].set(False),
                sampling=dataclasses.replace(state.sampling, temperature=temperature),
                cache=dataclasses.replace(state.cache, page_table=table),
            )

        return lower(release, state, self._scalar(), out=state, donate=(0,))

    def _compile_set_pages(self):
        state = self.abstract_state()

        def set_pages(state, table):
            cache = dataclasses.replace(state.cache, page_table=table)
            return dataclasses.replace(state, cache=cache)

        shape = (self.layout.batch_size, self.layout.pages_per_sequence)
        return lower(set_pages, state, self._whole(shape, jnp.int32), out=state, donate=(0,))

    # --- prompts --------------------------------------------------------------------------------

    def _compile_new_lanes(self):
        abstract = self.abstract_lanes()
        return lower(lambda: zeros(abstract), out=abstract)

    def _compile_prefill(self, rows: int):
        cache, lanes, lines = self.abstract_state().cache, self.abstract_lanes(), self.num_lanes
        anchors = self._whole((lines,), jnp.int32)

        def prefill(target_params, drafter_params, cache, lanes, chunk, asked, sampling):
            target = nnx.merge(self._target_graph, target_params)
            drafter = nnx.merge(self._drafter_graph, drafter_params)
            params = sampling.with_keys()
            return prefill_chunk(target, drafter, cache, lanes, chunk, params, asked)

        return lower(
            prefill, *self._weights, cache, lanes, self._abstract_chunk(rows),
            self._abstract_asked(lines), self._abstract_sampling(lines, None),
            out=(cache, lanes, anchors, self._abstract_logprobs(lines)), donate=(2, 3),
        )  # fmt: skip

    def _compile_plain(self, lanes: int):
        """What sequences ask for that ask for nothing, so that no call has to bring it along."""
        asked = first_token.plain(lanes, self.layout.max_length, self.target.arch.vocab_size)
        return lower(lambda: jax.tree.map(jnp.asarray, asked), out=self._abstract_asked(lanes))

    def _compile_insert(self):
        state, lanes = self.abstract_state(), self.abstract_lanes()
        table = self._whole((self.layout.pages_per_sequence,), jnp.int32)
        anchors = self._whole((self.num_lanes,), jnp.int32)
        stop_ids = self._whole((self.num_stop_ids,), jnp.int32)

        def insert(
            state, lanes, anchors, lane, slot, table, length, limit, stop_ids, asked, sampling
        ):
            anchor = anchors[lane]
            # What a sequence has said before this one may be on the device alone.
            asked = asked.with_tokens(
                jnp.reshape(length - 1, 1), anchor[None, None], jnp.ones(1, jnp.int32)
            )
            ended = (length >= limit) | jnp.any(anchor == stop_ids) | (anchor == nonfinite.NO_TOKEN)
            params = jax.tree.map(lambda x: x[None], sampling).with_keys()
            page_table = state.cache.page_table.at[slot].set(table)
            return DecodeState(
                length=state.length.at[slot].set(length),
                limit=state.limit.at[slot].set(limit),
                anchor=state.anchor.at[slot].set(anchor),
                active=state.active.at[slot].set(~ended),
                stop_ids=state.stop_ids.at[slot].set(stop_ids),
                sampling=jax.tree.map(
                    lambda batch, one: batch.at[slot].set(one[0]), state.sampling, params
                ),
                controls=jax.tree.map(
                    lambda batch, one: batch.at[slot].set(one[0]), state.controls, asked
                ),
                cache=dataclasses.replace(state.cache, page_table=page_table),
                drafter=self.drafter.insert(state.drafter, lanes, lane, slot),
                adaptive=state.adaptive and state.adaptive.insert(slot),
                nonfinite_at=state.nonfinite_at.at[slot].set(0),
                concluded=state.concluded,
            )

        number, one = self._scalar(), SamplingParams.of(Sampling())
        return lower(
            insert, state, lanes, anchors, number, number, table, number, number, stop_ids,
            self._abstract_asked(1).controls, jax.tree.map(self._replicated, one),
            out=state, donate=(0,),
        )  # fmt: skip

    # --- what is not finite ---------------------------------------------------------------------

    def _compile_new_examined(self):
        abstract = self._abstract_examined()

        def new_cache():
            cache = zeros(abstract)
            table = jnp.arange(1, cache.page_table.shape[1] + 1, dtype=jnp.int32)[None]
            return dataclasses.replace(cache, page_table=table)

        return lower(new_cache, out=abstract)

    def _abstract_examined(self):
        """A cache for one sequence alone."""
        pages = self.layout.prefill_pages
        return self.target.new_cache(
            batch=1,
            pages_per_sequence=pages,
            num_pages=pages + 1,
            page_size=self.layout.page_size,
            kv_dtype=self.config.kv_dtype,
        )

    def _compile_examine(self, rows: int):
        cache = self._abstract_examined()
        tokens = self._whole((1, rows), jnp.int32)

        def examine(target_params, cache, tokens, start, count):
            target = nnx.merge(self._target_graph, target_params)
            return nonfinite.examine_chunk(target, cache, tokens, start, count)

        sound = self._whole((len(nonfinite.stages(self.target)),), jnp.bool_)
        return lower(
            examine, self._weights[0], cache, tokens, self._scalar(), self._scalar(),
            out=(cache, sound), donate=(1,),
        )  # fmt: skip

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def num_lanes(self) -> int:
        """Prompts that are prefilled at once: one for each data replica."""
        return self.layout.num_replicas

    def abstract_lanes(self) -> Any:
        """The drafter's state of the prompts in prefill, abstract."""
        return self._abstract_drafter(self.num_lanes)

    def _abstract_drafter(self, batch: int) -> Any:
        spare = adaptive.spare_rows(self.rules.block_sizes)
        return self.drafter.init_state(batch, self.layout.capacity + spare)

    def _abstract_chunk(self, rows: int) -> ChunkInputs:
        lanes = self.num_lanes
        per_lane = self._whole((lanes,), jnp.int32)
        return ChunkInputs(
            tokens=self._whole((lanes, rows), jnp.int32),
            start=per_lane,
            count=per_lane,
            following=per_lane,
            fresh=self._whole((lanes,), jnp.bool_),
            table=self._whole((lanes, self.layout.prefill_pages), jnp.int32),
        )

    def _abstract_asked(self, lanes: int) -> first_token.FirstTokenConstraints:
        vocab_size = self.target.arch.vocab_size
        return first_token.abstract(lanes, self.layout.max_length, vocab_size, self.sharding)

    def _abstract_logprobs(self, *shape: int) -> logprobs.Logprobs:
        found = jax.eval_shape(lambda: logprobs.zeros(shape, self.target.arch.vocab_size))
        return jax.tree.map(self._replicated, found)

    def _abstract_sampling(self, batch: int, name: str | None) -> SamplingParams:
        def place(x):
            names = (name, *(None,) * x.ndim)
            return self.sharding.abstract((batch, *x.shape), names, x.dtype)

        return jax.tree.map(place, SamplingParams.of(Sampling()))

    def _seconds(self) -> jax.ShapeDtypeStruct:
        shape = len(self.layout.widths), len(self.rules.block_sizes)
        return self._whole(shape, jnp.float32)

    def _replicated(self, x) -> jax.ShapeDtypeStruct:
        return self._whole(x.shape, x.dtype)

    def _whole(self, shape, dtype) -> jax.ShapeDtypeStruct:
        return self.sharding.abstract(shape, (None,) * len(shape), dtype)

    def _scalar(self, dtype="int32") -> jax.ShapeDtypeStruct:
        return self._whole((), dtype)


def _is_state(x: Any) -> bool:
    return isinstance(x, DecodeState)


def _abstract(weights: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights
    )
