"""The engine's programs: compiled ahead of time, each for shapes that are known beforehand."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter
from dflash.inference import adaptive, broken, controls, cycle, dispatch, logprobs, timing
from dflash.inference.first_token import num_words
from dflash.inference.lowering import loop_options, lower
from dflash.inference.pages import Layout
from dflash.inference.prefill import prefill_chunk
from dflash.inference.request import Sampling
from dflash.inference.sampling import SamplingParams, sequence_params
from dflash.inference.state import DecodeState, Prefix
from dflash.layers.linear import matmul_precision
from dflash.models.decoder import Decoder


class Programs:
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
        self._functions: dict[str, Callable] = {"generate": self._generate}
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

    def names(self, prompt_lengths: Iterable[int]) -> list[tuple]:
        """Names of the programs that prompts of these lengths (in tokens) need."""
        per_bucket = [
            (kind, bucket)
            for bucket in self.layout.buckets(prompt_lengths)
            for kind in ("new_prefix", "prefill", "insert")
        ]
        growing = [("set_pages",)] if self.layout.overcommits else []
        timed = [("occupied",)] if len(self.rules.block_sizes) > 1 else []
        return [("new_state",), *per_bucket, ("generate",), ("release",), *growing, *timed]

    def missing(self, prompt_lengths: Iterable[int]) -> list[tuple]:
        """Those of these `names` that are not compiled yet."""
        return [name for name in self.names(prompt_lengths) if name not in self._compiled]

    def abstract_state(self) -> DecodeState:
        """Shapes, dtypes and shardings of the state, without its memory."""
        layout, target, drafter = self.layout, self.target, self.drafter
        batch, sizes = layout.batch_size, self.rules.block_sizes
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
                num_pages=layout.pages_per_share * layout.num_shares,
                page_size=layout.page_size,
                kv_dtype=self.config.kv_dtype,
            ),
            drafter=drafter.init_state(batch, layout.capacity + adaptive.spare_rows(sizes)),
            adaptive=adaptive.abstract(
                sizes,
                batch,
                len(drafter.feature_layers) * target.arch.hidden_size,
                target.dtype,
                self.sharding,
            ),
            broken_at=ints,
        )

    # --- over the models and the state ----------------------------------------------------------

    def _generate(self, target, drafter, state):
        return dispatch.run_cycles(
            target, drafter, state, max_cycles=self.config.sync_every, rules=self.rules
        )

    def _compile_added(self, function: Callable):
        state = self.abstract_state()
        inputs = *self._weights, state

        def program(target_params, drafter_params, state):
            target = nnx.merge(self._target_graph, target_params)
            return function(target, nnx.merge(self._drafter_graph, drafter_params), state)

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

    # --- over the state and prefixes ------------------------------------------------------------

    def _compile_new_state(self):
        abstract = self.abstract_state()

        def new_state(seconds):
            state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
            # An empty slot has a length of 1: its rows go to the start of the scratch page.
            chooser = adaptive.with_seconds(state.adaptive, seconds)
            length = jnp.ones_like(state.length)
            return dataclasses.replace(state, length=length, adaptive=chooser)

        return lower(new_state, self._seconds(), out=abstract)

    def _compile_occupied(self):
        state = self.abstract_state()
        sampling = Sampling.from_config(self.config)
        occupy = functools.partial(timing.occupy, layout=self.layout, sampling=sampling)
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

    def _compile_new_prefix(self, bucket: int):
        abstract = self._abstract_prefix(bucket)

        def new_prefix(asked, allowed, index, *sampling):
            prefix = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
            table = jnp.arange(1, prefix.cache.page_table.shape[1] + 1, dtype=jnp.int32)[None]
            cache = dataclasses.replace(prefix.cache, page_table=table)
            params = sequence_params(index, *sampling)
            asked = jax.tree.map(lambda x: x[None], asked)
            return dataclasses.replace(
                prefix, cache=cache, sampling=params, controls=asked, allowed=allowed[None]
            )

        dtypes = "int32", "uint32", "float32", "int32", "float32", "float32"
        scalars = [self._scalar(dtype) for dtype in dtypes]
        asked = jax.tree.map(lambda x: self._whole(x.shape[1:], x.dtype), abstract.controls)
        allowed = self._whole(abstract.allowed.shape[1:], jnp.int32)
        return lower(new_prefix, asked, allowed, *scalars, out=abstract)

    def _compile_prefill(self, bucket: int):
        abstract = self._abstract_prefix(bucket)
        tokens = self._whole((1, self.layout.chunk(bucket)), jnp.int32)

        def prefill(target_params, drafter_params, prefix, tokens, count, following):
            target = nnx.merge(self._target_graph, target_params)
            drafter = nnx.merge(self._drafter_graph, drafter_params)
            return prefill_chunk(target, drafter, prefix, tokens, count, following)

        return lower(
            prefill, *self._weights, abstract, tokens,
            self._scalar(), self._scalar(), out=abstract, donate=(2,),
        )  # fmt: skip

    def _compile_examine(self, bucket: int):
        cache = self._abstract_prefix(bucket).cache
        tokens = self._whole((1, self.layout.chunk(bucket)), jnp.int32)

        def examine(target_params, cache, tokens, start, count):
            target = nnx.merge(self._target_graph, target_params)
            return broken.examine_chunk(target, cache, tokens, start, count)

        sound = self._whole((len(broken.stages(self.target)),), jnp.bool_)
        return lower(
            examine, self._weights[0], cache, tokens, self._scalar(), self._scalar(),
            out=(cache, sound), donate=(1,),
        )  # fmt: skip

    def _compile_insert(self, bucket: int):
        state, prefix = self.abstract_state(), self._abstract_prefix(bucket)
        table = self._whole((self.layout.pages_per_sequence,), jnp.int32)
        pages = self._whole((self.layout.prefix_pages(bucket),), jnp.int32)

        def insert(state, prefix, slot, table, pages, limit, stop_ids, anchor):
            length = prefix.length[0] + 1
            asked = prefix.controls.with_tokens(
                prefix.length, anchor[None, None], jnp.ones(1, jnp.int32)
            )
            ended = (length >= limit) | jnp.any(anchor == stop_ids)
            return DecodeState(
                length=state.length.at[slot].set(length),
                limit=state.limit.at[slot].set(limit),
                anchor=state.anchor.at[slot].set(anchor),
                active=state.active.at[slot].set(~ended),
                stop_ids=state.stop_ids.at[slot].set(stop_ids),
                sampling=jax.tree.map(
                    lambda batch, one: batch.at[slot].set(one[0]), state.sampling, prefix.sampling
                ),
                controls=jax.tree.map(
                    lambda batch, one: batch.at[slot].set(one[0]), state.controls, asked
                ),
                cache=state.cache.insert(
                    prefix.cache, slot, self.layout.share_of(slot), table, pages, self.sharding
                ),
                drafter=self.drafter.insert(state.drafter, prefix.drafter, slot),
                adaptive=state.adaptive and state.adaptive.insert(slot),
                broken_at=state.broken_at.at[slot].set(0),
            )

        return lower(
            insert, state, prefix, self._scalar(), table, pages, self._scalar(),
            self._whole((self.num_stop_ids,), jnp.int32), self._scalar(), out=state, donate=(0,),
        )  # fmt: skip

    # --- shapes ---------------------------------------------------------------------------------

    def _abstract_prefix(self, bucket: int) -> Prefix:
        pages = self.layout.prefix_pages(bucket)
        one = self._whole((1,), jnp.int32)
        return Prefix(
            length=one,
            anchor=one,
            sampling=self._abstract_sampling(1, None),
            controls=controls.abstract(1, None, self.layout.max_length, self.sharding),
            allowed=self._whole((1, num_words(self.target.arch.vocab_size)), jnp.int32),
            logprobs=self._abstract_logprobs((1,)),
            cache=self.target.new_cache(
                batch=1,
                pages_per_sequence=pages,
                num_pages=pages + 1,
                page_size=self.layout.page_size,
                kv_dtype=self.config.kv_dtype,
            ),
            drafter=self.drafter.init_state(1, bucket),
            bucket=bucket,
        )

    def _abstract_sampling(self, batch: int, name: str | None) -> SamplingParams:
        floats = self.sharding.abstract((batch,), (name,), jnp.float32)
        return SamplingParams(
            seed=self.sharding.abstract((batch, 2), (name, None), jnp.uint32),
            temperature=floats,
            top_k=self.sharding.abstract((batch,), (name,), jnp.int32),
            top_p=floats,
            min_p=floats,
        )

    def _abstract_logprobs(self, shape) -> logprobs.Logprobs:
        zeros = jax.eval_shape(lambda: logprobs.zeros(shape, self.target.arch.vocab_size))
        return jax.tree.map(self._replicated, zeros)

    def _seconds(self) -> jax.ShapeDtypeStruct:
        return self._whole((len(self.rules.block_sizes),), jnp.float32)

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
