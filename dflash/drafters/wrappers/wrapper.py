"""Base of drafters that wrap another one."""

from typing import Any, NamedTuple

from dflash.drafters.base import Drafter
from dflash.layers.cache import batch_axes
from dflash.parallel.sharding import Sharding


class WrapperState(NamedTuple):
    """State of a wrapper.

    Attributes:
      inner: State of the inner drafter.
      outer: State of each sequence; all leaves are [B, …], and zeros for a new sequence.
      shared: State of all sequences together, past ones included.
    """

    inner: Any
    outer: Any
    shared: Any = ()


def _of_inner(name: str) -> property:
    return property(lambda self: getattr(self.inner, name))


class Wrapper(Drafter):
    """Drafter that does what its inner drafter does, unless a method is overridden."""

    feature_layers = _of_inner("feature_layers")
    num_draft_tokens = _of_inner("num_draft_tokens")
    has_probs = _of_inner("has_probs")
    has_confidence = _of_inner("has_confidence")
    prefix_cache_mode = _of_inner("prefix_cache_mode")
    rows_ahead = _of_inner("rows_ahead")
    longest_context = _of_inner("longest_context")
    longest_path = _of_inner("longest_path")
    drafts_trees = _of_inner("drafts_trees")

    def __init__(self, inner: Drafter, sharding: Sharding):
        """Wraps a drafter; `sharding` is that of the wrapper's own state."""
        self.inner, self.sharding = inner, sharding

    def per_sequence(self, batch: int, *shape: int, dtype: Any) -> Any:
        """Returns an abstract array [batch, *shape]."""
        name, _ = batch_axes(batch, self.sharding)
        return self.sharding.abstract((batch, *shape), (name, *[None] * len(shape)), dtype)

    def draft(self, state, *where):
        return self.draft_fewer(self.num_draft_tokens, state, *where)

    def draft_inner(self, drafter: Drafter, count: int, *where):
        """Lets the inner drafter, or a copy of it, draft `count` tokens."""
        if count == self.num_draft_tokens:
            return drafter.draft(*where)
        return drafter.draft_fewer(count, *where)

    def clear(self, state, fresh):
        inner = self.inner.clear(state.inner, fresh)
        return state._replace(inner=inner, outer=super().clear(state.outer, fresh))

    def insert(self, state, other, row, slot):
        inner = self.inner.insert(state.inner, other.inner, row, slot)
        return state._replace(
            inner=inner, outer=super().insert(state.outer, other.outer, row, slot)
        )

    def context_pages(self, num_pages, page_size):
        return self.inner.context_pages(num_pages, page_size)

    def read_rows(self, state, slot, start, count):
        return self.inner.read_rows(state.inner, slot, start, count)

    def write_rows(self, state, slot, start, rows):
        return state._replace(inner=self.inner.write_rows(state.inner, slot, start, rows))

    def learnt(self, state):
        return self.inner.learnt(state.inner), state.shared

    def with_learnt(self, state, learnt):
        inner, shared = learnt
        return state._replace(inner=self.inner.with_learnt(state.inner, inner), shared=shared)
