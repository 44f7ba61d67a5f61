"""Writes of a sequence's new rows to its pages, inside the kernels of paged attention.

HBM is written in windows of whole memory tiles, not row by row. The rows that the first window
already held before the new rows are written back unchanged. The scales of quantized rows extend
along the lanes, so a window of scales is a whole page.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu
from dflash.kernels.quantized import Quantized, Rows
from dflash.kernels.tile_stream_tpu import TileStream


@dataclasses.dataclass(frozen=True)
class Windows:
    """Shapes of the windows that a grid step writes.

    Attributes:
      kinds: Number of pools: 2 for keys and values, 1 for latents.
      heads: Heads of each pool that a grid step writes.
      length: New rows per sequence, T.
      padded: Rows of the array of new rows, at least T.
      width: Elements per row, H.
      page_size: Rows per page, S.
    """

    kinds: int
    heads: int
    length: int
    padded: int
    width: int
    page_size: int
    dtype: jnp.dtype
    quantized: bool

    @functools.cached_property
    def rows(self) -> int:
        """Rows per window."""
        rows = flash_tpu.row_tile(self.dtype)
        while self.page_size % (2 * rows) == 0 and 2 * rows <= self.length // 4:
            rows *= 2
        return rows

    @property
    def count(self) -> int:
        """Largest number of windows that the new rows of a sequence can touch."""
        return -(-(self.length + self.rows - 1) // self.rows)

    @property
    def scale_pages(self) -> int:
        """Largest number of pages that the new scales can touch; scales are written by page."""
        return -(-(self.length + self.page_size - 1) // self.page_size)

    @property
    def scale_lanes(self) -> int:
        """Lanes of the array of new scales."""
        lanes = max(self.scale_pages * self.page_size, self.padded)
        return lanes + -lanes % self.page_size

    @property
    def _shapes(self) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        staged = self.count * self.rows
        lanes = min(self.width, flash_tpu.LANES)
        return {
            "windows": ((self.kinds, self.heads, staged, self.width), self.dtype),
            "shifted rows": ((self.rows + staged, lanes), jnp.float32),
        }

    def scratch(self) -> list:
        """Returns the scratch shapes of `staged`, `shifted` and `semaphore` of a `PageWriter`."""
        return [
            *[pltpu.VMEM(*scratch) for scratch in self._shapes.values()],
            pltpu.SemaphoreType.DMA,
        ]

    def scale_scratch(self) -> list:
        """Returns the scratch shape of `staged_scales`, or an empty list for plain pools."""
        shape = (self.kinds, self.heads, 1, self.scale_lanes)
        return [pltpu.VMEM(shape, jnp.float32)] if self.quantized else []

    def vmem(self, tile: int, buffers: int) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        """Returns the arrays in VMEM by name, including the scales of the context's stream.

        Args:
          tile: Rows per tile of the stream.
        """
        if not self.quantized:
            return self._shapes
        lanes = self.kinds * (buffers * tile + 3 * self.scale_lanes)
        return self._shapes | {"scales": ((self.heads, 1, lanes), jnp.float32)}


def unsupported(op: str, pages: Rows) -> str | None:
    """Returns why pages cannot be written, or None if they can."""
    page_size, unit = pages.shape[2], flash_tpu.row_tile(pages.dtype)
    if page_size % unit:
        dtype = jnp.dtype(pages.dtype).name
        return f"{op}: pages of {page_size} rows, expected a multiple of {unit}, a tile of {dtype}"
    if isinstance(pages, Quantized) and page_size % flash_tpu.LANES:
        return f"{op}: quantized pages of {page_size} rows, expected multiples of {flash_tpu.LANES}"
    return None


@dataclasses.dataclass(frozen=True)
class PageWriter:
    """Asynchronous copies of one sequence's new rows to its pages.

    Attributes:
      start: int32 []; position of the first new row.
      own_heads: Index of this grid step's heads in a pool.
      page_of: Function from a position of the sequence to its page.
      new: New rows of each kind [K, padded, H], followed by their scales [K, 1, scale lanes] if
        quantized.
      pools: Pools in HBM, in the order of `new`: [K, P, S, H], and scales [K, P, 1, S].
      staged: [kinds, K, windows · rows, H]; contents of the windows.
      shifted: float32 [rows + windows · rows, lanes]; buffer in which rows are shifted.
      staged_scales: float32 [kinds, K, 1, scale lanes]; scales of the windows. None if the pools
        are plain.
      semaphore: DMA semaphore of the copies.
    """

    windows: Windows
    start: jax.Array
    own_heads: Any
    page_of: Callable
    new: list[jax.Ref]
    pools: list[jax.Ref]
    staged: jax.Ref
    shifted: jax.Ref
    staged_scales: jax.Ref | None
    semaphore: jax.Ref

    def write(self, stream: TileStream | None = None, slot=0) -> None:
        """Fills the windows with the new rows and starts copying them to the pages.

        Args:
          stream: Stream of the context; None if the context is empty, so that no old rows are kept.
          slot: Buffer of the stream that holds the context's last tile.
        """
        for kind in range(self.windows.kinds):
            for head in range(self.windows.heads):
                self._stage_rows(kind, head, stream, slot)
                if self.windows.quantized:
                    self._stage_scales(kind, head, stream, slot)
        self._copy(lambda copy: copy.start())

    def wait(self) -> None:
        """Waits until all copies are complete."""
        self._copy(lambda copy: copy.wait())

    def _stage_rows(self, kind, head, stream, slot):
        windows = self.windows
        window, staged = windows.rows, windows.count * windows.rows
        before = flash_tpu.rem(self.start, window)
        # Dynamic row offsets need 32-bit rows, and one tile of lanes at a time.
        moved = []
        lanes = self.shifted.shape[-1]
        for first in range(0, windows.width, lanes):
            new = self.new[kind][head, : windows.length, first : first + lanes]
            here = new.shape[1]
            self.shifted[...] = jnp.zeros_like(self.shifted)
            self.shifted[window : window + windows.length, :here] = new.astype(jnp.float32)
            moved.append(self.shifted[pl.ds(window - before, staged)][:, :here])
        moved = jnp.concatenate(moved, axis=-1).astype(self.staged.dtype)
        if stream is None:
            self.staged[kind, head] = moved
            return
        place = self._before_start(stream.tile, window)
        old = stream.buffers[kind][slot, head, place]
        is_old = jax.lax.broadcasted_iota(jnp.int32, (window, 1), 0) < before
        self.staged[kind, head, :window] = jnp.where(is_old, old, moved[:window])
        if staged > window:
            self.staged[kind, head, window:] = moved[window:]

    def _stage_scales(self, kind, head, stream, slot):
        page = self.windows.page_size
        before = flash_tpu.rem(self.start, page)
        moved = pltpu.roll(self.new[self.windows.kinds + kind][head], before, 1)
        if stream is None:
            self.staged_scales[kind, head] = moved
            return
        old = stream.scales.buffers[kind][slot, head, :, self._before_start(stream.tile, page)]
        is_old = jax.lax.broadcasted_iota(jnp.int32, (1, page), 1) < before
        self.staged_scales[kind, head, :, :page] = jnp.where(is_old, old, moved[:, :page])
        if self.windows.scale_lanes > page:
            self.staged_scales[kind, head, :, page:] = moved[:, page:]

    def _before_start(self, tile, window):
        """Returns the rows, within the context's last tile, of the first new row's window.

        If the first new row begins a new window, no old rows are kept, and the rows are arbitrary.
        """
        first = flash_tpu.rem(self.start - 1, tile) + 1 - flash_tpu.rem(self.start, window)
        return pl.ds(pl.multiple_of(jnp.minimum(first, tile - window), window), window)

    def _copy(self, act):
        windows, page_size = self.windows, self.windows.page_size
        for i, row in self._first_rows(windows.count, windows.rows):

            @pl.when(row < self.start + windows.length)
            def _(i=i, row=row):
                window = windows.rows
                place = pl.ds(pl.multiple_of(flash_tpu.rem(row, page_size), window), window)
                for kind in range(windows.kinds):
                    staged = self.staged.at[kind, :, i * window : (i + 1) * window]
                    act(self._to_page(staged, self.pools[kind], row, place))

        for i, row in self._first_rows(windows.scale_pages * windows.quantized, page_size):

            @pl.when(row < self.start + windows.length)
            def _(i=i, row=row):
                lanes = slice(i * page_size, (i + 1) * page_size)
                for kind in range(windows.kinds):
                    staged = self.staged_scales.at[kind, :, :, lanes]
                    act(self._to_page(staged, self.pools[windows.kinds + kind], row))

    def _first_rows(self, count, rows):
        """Returns (index, first row) of `count` windows of `rows` rows."""
        first = self.start - flash_tpu.rem(self.start, rows)
        return [(i, first + i * rows) for i in range(count)]

    def _to_page(self, staged, pool, row, *place):
        page = pool.at[(self.own_heads, self.page_of(row), *place)]
        return pltpu.make_async_copy(staged, page, self.semaphore)
