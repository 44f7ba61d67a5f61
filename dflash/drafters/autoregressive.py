"""Draft model: a smaller language model that drafts token by token.

Source: Leviathan et al. 2023. The model is of any target family, and has its own embedding, output
head and paged cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.drafters import base_config
from dflash.drafters.autoregressive_config import AutoregressiveConfig, DraftModelArchitecture
from dflash.drafters.base import Drafter
from dflash.drafters.parts import chain
from dflash.layers.cache import PagedCache, batch_axes

PAGE_TOKENS = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModelState:
    """Context of B sequences, anchor included, which is one row more than `observe` committed.

    Attributes:
      cache: Cache of the draft model; sequence b owns pages b·M … b·M + M - 1. Rows past the anchor
        are stale.
      hidden: Hidden state of the anchor after the final norm, [B, D]; it predicts the first draft.
      table: Pages of each sequence, int32 [B, M]; None if it owns them as above.
    """

    cache: PagedCache
    hidden: jax.Array
    table: jax.Array | None = None


class Autoregressive(Drafter):
    """Drafter that runs a smaller language model.

    Each sequence owns a fixed range of pages, so there is no page pool.
    """

    has_probs = True
    drafts_with_model = True
    prefix_cache_mode = "rows"

    def __init__(self, model: nnx.Module, *, block_size: int, page_size: int = PAGE_TOKENS):
        """Wraps an abstract draft model.

        Args:
          model: Draft model, a `models.decoder.Decoder`.
          block_size: Number of rows that the target verifies, anchor included.
          page_size: Tokens per page of the model's cache.
        """
        self.model = model
        self.num_draft_tokens = block_size - 1
        self.page_size = page_size

    @classmethod
    def create(cls, config: AutoregressiveConfig, hf, target, *, family: type, dtype, sharding):
        """Creates an abstract drafter and checks it against its target; see `Drafter.create`.

        Args:
          family: Class of the draft model, a registered target family.
        """
        if hf is None:
            arch = (config.architecture or DraftModelArchitecture()).for_target(target)
        else:
            arch = family.architecture_from_hf(hf)
            if config.architecture is not None:
                base_config.check_stated(config, config.architecture.for_target(target), arch)
        if arch.vocab_size != target.vocab_size:
            raise errors.CheckpointError(
                f"drafter.checkpoint: the vocabulary of {arch.vocab_size} tokens differs from the "
                f"target's of {target.vocab_size}; use a model of the target's family"
            )
        model = family(arch, dtype=dtype, sharding=sharding)
        if model.has_recurrent_state:
            raise errors.ConfigError(
                f"drafter.checkpoint: {family.hf_architectures[0]} keeps recurrent state, which "
                "does not return to an earlier token after rejected drafts; use a draft model "
                "with full attention in all layers"
            )
        return cls(model, block_size=config.block_size)

    @property
    def checkpointed(self) -> nnx.Module:
        """Part that a checkpoint holds: the model, with the parameter names of a target."""
        return self.model

    def init_state(self, batch, max_length):
        """Returns an abstract state with room for a whole block and the anchor after it."""
        arch, sharding = self.model.arch, self.model.sharding
        name, _ = batch_axes(batch, sharding)
        pages = -(-(max_length + self.block_size + 1) // self.page_size)
        cache = self.model.new_cache(
            batch=batch, pages_per_sequence=pages, num_pages=batch * pages, page_size=self.page_size
        )
        hidden = sharding.abstract((batch, arch.hidden_size), (name, None), self.model.dtype)
        return DraftModelState(cache, hidden)

    def draft(self, state, anchor, position, sampler, heads):
        """Drafts a chain; see `Drafter.draft`.

        The model has already run over the anchor, in `observe`. Keys and values of the drafts are
        written past the anchor's, where the next `observe` overwrites them.
        """
        return self.draft_fewer(self.num_draft_tokens, state, anchor, position, sampler, heads)

    def draft_fewer(self, count, state, anchor, position, sampler, heads):

        def extend(hidden, tokens, state, step):
            del hidden  # The model reads only tokens.
            return self.run(state, tokens, position + 1 + step)

        return chain.draft(
            state.hidden[:, None],
            state,
            position,
            num_draft_tokens=count,
            logits=self.model.unembed,
            extend=extend,
            sampler=sampler,
        )

    def observe(self, state, position, tokens, num_committed, features, heads):
        hidden, state = self.run(state, tokens, position)
        newest = jnp.take_along_axis(hidden, num_committed[:, None, None], axis=1)[:, 0]
        return dataclasses.replace(state, hidden=newest)

    def run(
        self, state: DraftModelState, tokens: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, DraftModelState]:
        """Runs the model over tokens int32 [B, T] at positions from start int32 [B] on.

        Returns:
          hidden [B, T, D] after the final norm, and the state with T more rows of context.
        """
        cache = dataclasses.replace(state.cache, page_table=self._table(state))
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        output = self.model(tokens, positions, cache)
        return output.hidden, dataclasses.replace(state, cache=output.cache)

    def _table(self, state: DraftModelState) -> jax.Array:
        if state.table is not None:
            return state.table
        batch, pages = state.cache.page_table.shape
        name, _ = batch_axes(batch, self.model.sharding)
        # Page indices are relative to the device's shard of the pool.
        local = jnp.arange(batch) % (batch // self.model.sharding.size(name))
        return (local[:, None] * pages + jnp.arange(pages)).astype(jnp.int32)

    def clear(self, state, fresh):
        """Returns the state unchanged, since rows are read only after they were observed."""
        return state

    def insert(self, state, other, row, slot):
        """Copies the sequence's pages and hidden state; see `Drafter.insert`."""
        _, pages = state.cache.page_table.shape

        def put(pool, other_pool):
            sequence = jax.lax.dynamic_slice_in_dim(other_pool, row * pages, pages, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(pool, sequence, slot * pages, axis=1)

        layers = jax.tree.map(put, state.cache.layers, other.cache.layers)
        cache = dataclasses.replace(state.cache, layers=layers)
        return DraftModelState(cache, super().insert(state.hidden, other.hidden, row, slot))

    def context_pages(self, num_pages, page_size):
        cache = self.model.new_cache(
            batch=num_pages, pages_per_sequence=1, num_pages=num_pages, page_size=page_size
        )
        form = jax.tree.structure(cache.layers)
        pages = [
            self.model.sharding.abstract(
                (num_pages, pool.shape[0], *pool.shape[2:]), ("pages", axis, None, None), pool.dtype
            )
            for pool, axis in zip(cache.pools, cache.axes, strict=True)
        ]
        return jax.tree.unflatten(form, pages)

    def read_rows(self, state, slot, start, count):
        begin = self._first_row(state, slot) + start

        def read(pool):
            rows = pool.reshape(pool.shape[0], -1, pool.shape[-1])
            return jax.lax.dynamic_slice_in_dim(rows, begin, count, axis=1)

        return jax.tree.map(read, state.cache.layers)

    def write_rows(self, state, slot, start, rows):
        begin = self._first_row(state, slot) + start

        def write(pool, new):
            flat = pool.reshape(pool.shape[0], -1, pool.shape[-1])
            flat = jax.lax.dynamic_update_slice_in_dim(flat, new, begin, axis=1)
            return flat.reshape(pool.shape)

        layers = jax.tree.map(write, state.cache.layers, rows)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))

    def _first_row(self, state: DraftModelState, slot: jax.Array) -> jax.Array:
        """Returns the index of a slot's first row, counted over the pages of all slots."""
        return slot * state.cache.page_table.shape[1] * self.page_size

    def loss(self, batch, heads, key, options, *, remat=False) -> Any:
        """Raises ConfigError, since the draft model is trained as a target."""
        raise errors.ConfigError(
            "drafter.name: a draft model is trained as a target (task=target), not as a drafter"
        )
