"""Shapes, dtypes and shardings of everything that the engine's programs take and return.

Programs are compiled ahead of time, so all of this is known before any array exists.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.inference import first_token
from dflash.inference.cycle import backlog, choice, dispatch
from dflash.inference.cycle.rules import Rules
from dflash.inference.cycle.state import DecodeState
from dflash.inference.logits import controls
from dflash.inference.logits.sampling import SamplingParams
from dflash.inference.pages import Layout
from dflash.inference.prefill import ChunkInputs
from dflash.inference.request import RequestSampling
from dflash.layers.cache import PagedCache
from dflash.models.decoder import Decoder


class Shapes:
    """Abstract arguments and results of the programs over one target and one drafter.

    Attributes:
      target: The target, for its shape and placement. Its weights are arguments of programs.
      drafter: The drafter, for its shape and placement. Its weights are arguments of programs.
      rules: How a cycle drafts and verifies.
      num_stop_ids: Stop ids that a request may have.
      dtype: Dtype of the target, which decides the precision of products.
      weights: Abstract weights of the target and of the drafter.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        config: DecodeConfig,
        *,
        layout: Layout,
        rules: Rules,
        num_stop_ids: int,
    ):
        """Splits the models into graphs, which are static, and abstract weights."""
        self.target, self.drafter, self.config = target, drafter, config
        self.layout, self.rules, self.num_stop_ids = layout, rules, num_stop_ids
        self.sharding, self.dtype = target.sharding, target.dtype
        self.vocab_size = target.arch.vocab_size
        self.target_graph, target_weights = nnx.split(target)
        self.drafter_graph, drafter_weights = nnx.split(drafter)
        # The engine may take other weights of the same shapes.
        self.weights = abstract(target_weights), abstract(drafter_weights)

    @property
    def num_prefill_slots(self) -> int:
        """Number of prompts that are prefilled at once, one per data replica."""
        return self.layout.num_replicas

    # --- single arrays --------------------------------------------------------------------------

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """Sharding of an array that every device holds whole."""
        return self.scalar().sharding

    def array(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Returns an array that every device holds whole."""
        return self.sharding.abstract(shape, (None,) * len(shape), dtype)

    def scalar(self) -> jax.ShapeDtypeStruct:
        """Returns an int32 number."""
        return self.array(())

    def table_row(self) -> jax.ShapeDtypeStruct:
        """Returns the page table's row of one sequence, int32 [M]."""
        return self.array((self.layout.pages_per_sequence,))

    def seconds(self) -> jax.ShapeDtypeStruct:
        """Returns times of cycles, float32 [W, 2, S]; see `ChosenRows`."""
        shape = len(self.layout.bucket_sizes), 2, len(self.rules.choices)
        return self.array(shape, jnp.float32)

    # --- the batch ------------------------------------------------------------------------------

    def state(self, bucket: int | None = None) -> DecodeState:
        """Returns the state of the batch.

        Args:
          bucket: Slots of each data replica; None for all. The pool of pages stays whole.
        """
        layout, target, drafter = self.layout, self.target, self.drafter
        batch = (bucket or layout.slots_per_replica) * layout.num_replicas
        ints = self.sharding.abstract((batch,), ("batch",), jnp.int32)
        return DecodeState(
            length=ints,
            limit=ints,
            anchor=ints,
            active=self.sharding.abstract((batch,), ("batch",), jnp.bool_),
            stop_ids=self.sharding.abstract((batch, self.num_stop_ids), ("batch", None), jnp.int32),
            sampling=dataclasses.replace(
                self.sampling(batch, "batch"),
                seed=self.sharding.abstract((batch, 2), ("batch", None), jnp.uint32),  # Key data.
            ),
            controls=controls.abstract(batch, "batch", layout.max_length, self.sharding),
            cache=target.new_cache(
                batch=batch,
                pages_per_sequence=layout.pages_per_sequence,
                num_pages=layout.pages_per_replica * layout.num_replicas,
                page_size=layout.page_size,
                kv_dtype=self.config.kv_dtype,
                ring=layout.ring,
            ),
            drafter=self._drafter_state(batch),
            choice=choice.abstract(
                self.rules.choices,
                batch,
                len(drafter.feature_layers) * target.arch.hidden_size,
                target.dtype,
                self.sharding,
                len(layout.bucket_sizes),
            ),
            nonfinite_at=ints,
            concluded=self.scalar(),
            adapter=ints if self.target.adapters else None,
        )

    def sampling(self, batch: int, name: str | None = None) -> SamplingParams:
        """Returns the sampling parameters of `batch` sequences, split over the axis `name`."""

        def place(x):
            names = (name, *(None,) * x.ndim)
            return self.sharding.abstract((batch, *x.shape), names, x.dtype)

        return jax.tree.map(place, SamplingParams.of(RequestSampling()))

    def one_sampling(self) -> SamplingParams:
        """Returns the sampling parameters of one sequence, without a batch dimension."""
        params = SamplingParams.of(RequestSampling())
        return jax.tree.map(lambda x: self.array(x.shape, x.dtype), params)

    def proposal(self, run: Any) -> Proposal:
        """Returns a proposal for the batch, for the host to read.

        Tokens are on every device; probabilities are split as the target's are.

        Args:
          run: `dispatch.propose` over weights.
        """
        _, proposal = jax.eval_shape(run, *self.weights, self.state())
        probs = proposal.probs
        if probs is not None:
            probs = self.sharding.abstract(probs.shape, ("batch", None, "vocab"), probs.dtype)
        tokens = dataclasses.replace(proposal, probs=None)
        tokens = jax.tree.map(lambda x: self.array(x.shape, x.dtype), tokens)
        return dataclasses.replace(tokens, probs=probs)

    # --- prompts --------------------------------------------------------------------------------

    def prefill_state(self) -> Any:
        """Returns the drafter's state of the prompts in prefill."""
        return self._drafter_state(self.num_prefill_slots)

    def chunk(self, rows: int) -> ChunkInputs:
        """Returns a prefill chunk of `rows` tokens of every prompt."""
        count = self.num_prefill_slots
        per_prompt = self.array((count,))
        return ChunkInputs(
            tokens=self.array((count, rows)),
            start=per_prompt,
            count=per_prompt,
            following=per_prompt,
            fresh=self.array((count,), jnp.bool_),
            slot=per_prompt,
            table=self.array((count, self.layout.prefill_pages)),
            adapter=per_prompt,
        )

    def constraints(self, batch: int) -> first_token.FirstTokenConstraints:
        """Returns the constraints on the first tokens of `batch` sequences."""
        length = self.layout.max_length
        return first_token.abstract(batch, length, self.vocab_size, self.sharding)

    def context(self) -> Any:
        """Returns the pages of the drafter's rows: one for each page of the target."""
        num_pages = self.layout.pages_per_replica * self.layout.num_replicas
        return self.drafter.context_pages(num_pages, self.layout.page_size)

    def examined(self) -> PagedCache:
        """Returns a cache of one sequence alone."""
        pages = self.layout.prefill_pages
        return self.target.new_cache(
            batch=1,
            pages_per_sequence=pages,
            num_pages=pages + 1,
            page_size=self.layout.page_size,
            kv_dtype=self.config.kv_dtype,
        )

    def _drafter_state(self, batch: int) -> Any:
        spare = backlog.spare_rows(self.rules.block_sizes)
        return self.drafter.init_state(batch, self.layout.capacity + spare)

    # --- functions over models ------------------------------------------------------------------

    def over_models(self, function: Any) -> Any:
        """Turns a function of (target, drafter, …) into one of (their weights, …)."""

        def program(target_params, drafter_params, *args):
            target = nnx.merge(self.target_graph, target_params)
            return function(target, nnx.merge(self.drafter_graph, drafter_params), *args)

        return program

    def over_target(self, function: Any) -> Any:
        """Turns a function of (target, …) into one of (its weights, …)."""
        return lambda params, *args: function(nnx.merge(self.target_graph, params), *args)

    def propose(self) -> Any:
        """Returns `dispatch.propose` over weights."""

        def propose(target, drafter, state):
            return dispatch.propose(target, drafter, state, rules=self.rules)

        return self.over_models(propose)


def places(abstract: Any) -> Any:
    """Returns the shardings of abstract arrays."""
    return jax.tree.map(lambda x: x.sharding, abstract)


def abstract(weights: Any) -> Any:
    """Returns the shapes, dtypes and shardings of weights."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights
    )
