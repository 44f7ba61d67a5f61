"""How the new rows of a sequence enter its pages, inside the kernel of paged attention.

HBM is not written row by row but in windows of whole memory tiles: what the first window held in
front of the new rows is put back there. The scales of quantised rows lie along the lanes, so their
window is a page.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu
from dflash.kernels.tile_stream_tpu import TileStream


@dataclasses.dataclass(frozen=True)
class PageWriter:
    """The new rows of one sequence on their way.

    Attributes:
      plan: of the call; see `paged_attention_tpu.Plan`.
      start: int32 []; position of the first new row.
      own_heads: of the kv heads of a pool, those of this step.
      page_of: row of the sequence -> page.
      new: keys and values [K, padded, H], and then their scales [K, 1, scale lanes] if any.
      pools: in HBM, of the same: [K, P, S, H], and [K, P, 1, S].
      staged: [2, K, windows · window rows, H]; keys and values in their places.
      shifted: float32 [window rows + windows · window rows, lanes]; a place to shift rows in.
      staged_scales: float32 [2, K, 1, scale lanes], or None.
      semaphore: of the copies.
    """

    plan: Any
    start: jax.Array
    own_heads: Any
    page_of: Callable
    new: list[jax.Ref]
    pools: list[jax.Ref]
    staged: jax.Ref
    shifted: jax.Ref
    staged_scales: jax.Ref | None
    semaphore: jax.Ref

    def write(self, stream: TileStream | None = None, half=0) -> None:
        """Puts the rows in place and starts their copies to the pages.

        Args:
          stream: of the context; None where the sequence has none, and no window has anything to
            keep.
          half: half of the stream's double buffer that holds the context's last tile.
        """
        for kind in range(2):
            for head in range(self.plan.step_heads):
                self._stage_rows(kind, head, stream, half)
                if self.plan.quantised:
                    self._stage_scales(kind, head, stream, half)
        self._copy(lambda copy: copy.start())

    def wait(self) -> None:
        """Until all copies are done."""
        self._copy(lambda copy: copy.wait())

    def _stage_rows(self, kind, head, stream, half):
        plan = self.plan
        window, staged = plan.window_rows, plan.windows * plan.window_rows
        before = flash_tpu.rem(self.start, window)
        # Only 32-bit rows can be read from any row on, and only one tile of lanes at a time.
        moved = []
        lanes = self.shifted.shape[-1]
        for i in range(plan.width // lanes):
            new = self.new[kind][head, : plan.length, i * lanes : (i + 1) * lanes]
            self.shifted[...] = jnp.zeros_like(self.shifted)
            self.shifted[window : window + plan.length] = new.astype(jnp.float32)
            moved.append(self.shifted[pl.ds(window - before, staged)])
        moved = jnp.concatenate(moved, axis=-1).astype(self.staged.dtype)
        if stream is None:
            self.staged[kind, head] = moved
            return
        place = self._before_start(window)
        old = (stream.keys, stream.values)[kind][half, head, place]
        kept = jax.lax.broadcasted_iota(jnp.int32, (window, 1), 0) < before
        self.staged[kind, head, :window] = jnp.where(kept, old, moved[:window])
        if staged > window:
            self.staged[kind, head, window:] = moved[window:]

    def _stage_scales(self, kind, head, stream, half):
        page = self.plan.page_size
        before = flash_tpu.rem(self.start, page)
        moved = pltpu.roll(self.new[2 + kind][head], before, 1)
        if stream is None:
            self.staged_scales[kind, head] = moved
            return
        old = stream.scales.buffers[kind][half, head, :, self._before_start(page)]
        kept = jax.lax.broadcasted_iota(jnp.int32, (1, page), 1) < before
        self.staged_scales[kind, head, :, :page] = jnp.where(kept, old, moved[:, :page])
        if self.plan.scale_lanes > page:
            self.staged_scales[kind, head, :, page:] = moved[:, page:]

    def _before_start(self, window):
        """In the context's last tile, the window that the first new row enters.

        It is any window where that row begins one of its own: nothing of it is kept then.
        """
        tile = self.plan.tile
        first = flash_tpu.rem(self.start - 1, tile) + 1 - flash_tpu.rem(self.start, window)
        return pl.ds(pl.multiple_of(jnp.minimum(first, tile - window), window), window)

    def _copy(self, act):
        plan = self.plan
        for i, row in self._windows(plan.windows, plan.window_rows):

            @pl.when(row < self.start + plan.length)
            def _(i=i, row=row):
                window = plan.window_rows
                place = pl.ds(pl.multiple_of(flash_tpu.rem(row, plan.page_size), window), window)
                for kind in range(2):
                    staged = self.staged.at[kind, :, i * window : (i + 1) * window]
                    act(self._to_page(staged, self.pools[kind], row, place))

        for i, row in self._windows(plan.scale_pages if plan.quantised else 0, plan.page_size):

            @pl.when(row < self.start + plan.length)
            def _(i=i, row=row):
                lanes = slice(i * plan.page_size, (i + 1) * plan.page_size)
                for kind in range(2):
                    staged = self.staged_scales.at[kind, :, :, lanes]
                    act(self._to_page(staged, self.pools[2 + kind], row))

    def _windows(self, count, rows):
        """Index and first row of each window of so many rows."""
        first = self.start - flash_tpu.rem(self.start, rows)
        return [(i, first + i * rows) for i in range(count)]

    def _to_page(self, staged, pool, row, *place):
        page = pool.at[(self.own_heads, self.page_of(row), *place)]
        return pltpu.make_async_copy(staged, page, self.semaphore)
