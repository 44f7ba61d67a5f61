"""States of a drafter for several continuations of each sequence, to draft from each of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter


class Copies:
    """Forks of a drafter whose arrays have a batch axis first: copies of its state."""

    def __init__(self, drafter: Drafter, count: int):
        """Forks each sequence of a drafter into `count` ones."""
        self.drafter, self.count = drafter, count

    def init_state(self, batch: int, max_length: int) -> Any:
        """Returns an abstract state of the drafter with room for the forks."""
        return self.drafter.init_state(batch, max_length)

    def open(self, state: Any, position: jax.Array) -> Any:
        """Returns the states of the forks, which may differ from `position` int32 [B] on."""
        return jax.tree.map(lambda x: jnp.repeat(x, self.count, axis=0), state)

    def close(self, state: Any, forked: Any) -> Any:
        """Returns the state once its forks are used up."""
        return state


class SharedPages(Copies):
    """Forks of a draft model: they share all pages but those that their rows may fill.

    Copies of a whole cache would take as much memory as that many more sequences.
    """

    @property
    def _own_pages(self) -> int:  # For the rows of a block, and of the block after it.
        return 1 + -(-2 * self.drafter.block_size // self.drafter.page_size)

    def init_state(self, batch: int, max_length: int) -> Any:
        """Returns an abstract state whose pool has pages for the forks behind all others."""
        state, size = self.drafter.init_state(batch, max_length), self.drafter.page_size
        pages = state.cache.page_table.shape[1]
        num_pages = batch * (pages + self.count * self._own_pages)
        sizes = {"batch": batch, "pages_per_sequence": pages, "num_pages": num_pages}
        cache = self.drafter.model.new_cache(page_size=size, **sizes)
        return dataclasses.replace(state, cache=cache)

    def open(self, state: Any, position: jax.Array) -> Any:
        """Returns the states of the forks; their pages from that of `position` on are copies."""
        batch, pages = state.cache.page_table.shape
        trunk = jnp.arange(batch * pages).reshape(batch, pages)
        index = position[:, None] // self.drafter.page_size + jnp.arange(self._own_pages)
        sources = jnp.take_along_axis(trunk, jnp.minimum(index, pages - 1), axis=1)
        table, index, sources = (jnp.repeat(x, self.count, axis=0) for x in (trunk, index, sources))
        copies = batch * pages + jnp.arange(sources.size).reshape(sources.shape)
        forks = jnp.arange(batch * self.count)[:, None]
        table = table.at[forks, index].set(copies, mode="drop").astype(jnp.int32)
        layers = jax.tree.map(
            lambda pool: pool.at[:, copies].set(pool[:, sources]), state.cache.layers
        )
        cache = dataclasses.replace(state.cache, layers=layers)
        hidden = jnp.repeat(state.hidden, self.count, axis=0)
        return dataclasses.replace(state, cache=cache, hidden=hidden, table=table)

    def close(self, state: Any, forked: Any) -> Any:
        """Returns the state with the pool of the forks, so that XLA updates it in place."""
        cache = dataclasses.replace(state.cache, layers=forked.cache.layers)
        return dataclasses.replace(state, cache=cache)
