"""Programs of the prefix cache: the drafter's rows from slots to pages, and from there to lanes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.inference.lowering import lower, zeros
from dflash.inference.prefill import replay_chunk


class ContextPrograms:
    """The part of `Programs` that is about cached prefixes."""

    @property
    def keeps_rows(self) -> bool:
        """Whether rows of the drafter are kept beside cached pages of the target."""
        return self.layout.prefix_cache and bool(jax.tree.leaves(self.abstract_context()))

    @property
    def replays(self) -> bool:
        """Whether the drafter observes cached tokens again."""
        return self.layout.prefix_cache and self.drafter.prefix_cache_mode == "tokens"

    def abstract_context(self) -> Any:
        """Pages for the drafter's rows, one for each of the target's, abstract."""
        num_pages = self.layout.pages_per_replica * self.layout.num_replicas
        return self.drafter.context_pages(num_pages, self.layout.page_size)

    def _compile_new_context(self):
        abstract = self.abstract_context()
        return lower(lambda: zeros(abstract), out=abstract)

    def _compile_store(self):
        """Rows of a slot -> pages."""
        context, state = self.abstract_context(), self.abstract_state().drafter
        size, slots = self.layout.page_size, self.layout.slots_per_replica

        def store(context, state, slot, pages, end):
            share, mine = slot // slots, slot % slots

            def put(i, context):
                rows = self.drafter.read_rows(state, mine, i * size, size)
                return jax.tree.map(lambda pool, new: pool.at[pages[i]].set(new), context, rows)

            return jax.lax.fori_loop(0, jnp.where(self._is_mine(share), end, 0), put, context)

        return self._lower_local(store, context, state, out=context, donate=(0,))

    def _compile_restore(self):
        """Pages -> the first rows of a lane."""
        context, lanes, size = self.abstract_context(), self.abstract_lanes(), self.layout.page_size

        def restore(lanes, context, lane, pages, end):
            is_mine = self._is_mine(lane)

            def put(i, lanes):
                rows = jax.tree.map(lambda pool: pool[pages[i]], context)
                return self.drafter.write_rows(lanes, jnp.int32(0), i * size, rows)

            lanes = self.drafter.clear(lanes, jnp.reshape(is_mine, (1,)))
            return jax.lax.fori_loop(0, jnp.where(is_mine, end, 0), put, lanes)

        return self._lower_local(restore, lanes, context, out=lanes, donate=(0,))

    def _compile_replay(self, rows: int):
        lanes = self.abstract_lanes()

        def replay(target_params, drafter_params, lanes, chunk):
            target = nnx.merge(self._target_graph, target_params)
            drafter = nnx.merge(self._drafter_graph, drafter_params)
            return replay_chunk(drafter, lanes, chunk, target)

        chunk = self._abstract_chunk(rows)
        return lower(replay, *self._weights, lanes, chunk, out=lanes, donate=(2,))

    def _is_mine(self, share: jax.Array) -> jax.Array:
        return share == self.sharding.index("pages")

    def _lower_local(self, function: Callable, *trees: Any, out: Any, donate: tuple[int, ...]):
        """Compiles a program that each device runs on its own shards of `trees`.

        After these it takes a number, pages of one sequence, and how many of them count.
        """
        pages = self._whole((self.layout.pages_per_sequence,), jnp.int32)
        inputs = *trees, self._scalar(), pages, self._scalar()
        if self.sharding.mesh.size > 1:
            in_specs, out_specs = jax.tree.map(lambda x: x.sharding.spec, (inputs, out))
            function = jax.shard_map(
                function,
                mesh=self.sharding.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )
        return lower(function, *inputs, out=out, donate=donate)
