"""Stream of keys and values from HBM, tile by tile, overlapped with the computation on each tile.

The last tile of a sequence is visited first: it may be incomplete, and a paged cache appends rows
to it. All other tiles are complete, so their loop needs no masks. The last tile has a separate
buffer, so that the next sequence's last tile can be copied as soon as this one is processed. Tiles
can also be visited in ascending order, which then does not depend on the number of rows.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu, quantized
from dflash.kernels.quantized import Quantized, Rows

BUFFERS = 3  # Two for complete tiles, one for the last tile.
LAST = 2  # Index of the last tile's buffer.


@dataclasses.dataclass(frozen=True)
class TileScales:
    """Scales of a stream of quantized rows.

    Attributes:
      buffers: Buffers of key scales and of value scales, each float32 [3, K, 1, tile] in VMEM;
        latents have a single one.
      source: Function from (sequence, first row of a page) to the page's scales for each buffer,
        [K, 1, page] in HBM. Copies cannot split lanes, so the scales of a page are copied whole.
      dtype: Dtype of the rows in matrix products.
    """

    buffers: tuple[jax.Ref, ...]
    source: Callable
    dtype: jnp.dtype

    @staticmethod
    def scratch(heads: int, tile: int, kinds: int = 2) -> list:
        """Returns the scratch shapes of the buffers."""
        return [pltpu.VMEM((BUFFERS, heads, 1, tile), jnp.float32)] * kinds


@dataclasses.dataclass(frozen=True)
class TileStream:
    """Double-buffered copies of tiles from HBM.

    Attributes:
      buffers: Buffers of keys and of values, each [3, K, tile, H] in VMEM. Latents have a single
        one, since each value is a prefix of its key.
      semaphores: DMA semaphores [3], one per buffer index.
      source: Function from (sequence, first row, number of rows) to the rows for each buffer,
        [K, rows, H] in HBM. The rows belong to one page.
      page_rows: Rows per page, or per tile if the context has no pages; a tile is a whole number of
        pages.
      length: Function from a sequence to its number of rows in use.
      scales: Scales of quantized rows; None for plain rows.
      value_width: Elements of a latent's value; None for separate keys and values.
      ascending: Whether the last tile is visited last.
    """

    buffers: tuple[jax.Ref, ...]
    semaphores: jax.Ref
    source: Callable
    page_rows: int
    length: Callable
    scales: TileScales | None = None
    value_width: int | None = None
    ascending: bool = False

    @staticmethod
    def scratch(heads: int, tile: int, width: int, dtype: jnp.dtype, kinds: int = 2) -> list:
        """Returns the scratch shapes of the buffers and of the semaphores."""
        buffers = pltpu.VMEM((BUFFERS, heads, tile, width), dtype)
        return [*[buffers] * kinds, pltpu.SemaphoreType.DMA((BUFFERS,))]

    @property
    def tile(self) -> int:
        """Rows per tile."""
        return self.buffers[0].shape[2]

    def rows(self, kind: int, slot, head) -> Rows:
        """Returns a head's tile of keys (kind 0) or values (kind 1) in a buffer, [tile, H]."""
        if self.value_width is None:
            return self._rows(kind, slot, head)
        keys = self._rows(0, slot, 0)
        return quantized.leading(keys, self.value_width) if kind else keys

    def _rows(self, kind, slot, head) -> Rows:
        values = self.buffers[kind][slot, head]
        if self.scales is None:
            return values
        return Quantized(values.astype(self.scales.dtype), self.scales.buffers[kind][slot, head])

    def open(self, sequence) -> None:
        """Starts the copy for the first sequence; `run` starts those for all later sequences."""
        self._copy_last(sequence, _start)

    def run(self, sequence, following, has_following, first_tile, visit_last, visit) -> None:
        """Visits the tiles of a sequence; a sequence without rows has none.

        Args:
          following: Index of the next sequence.
          has_following: Whether there is a next sequence, bool [].
          first_tile: First tile to visit; the last tile is always visited.
          visit_last: Function called with (buffer, tile index) of the last tile, whose rows at and
            past the sequence's length are undefined.
          visit: Function called with (buffer, tile index) of every other tile.
        """
        tiles = flash_tpu.cdiv(self.length(sequence), self.tile)
        first_tile = jnp.minimum(first_tile, tiles - 1)
        full_tiles = tiles - 1 - first_tile

        @pl.when(full_tiles > 0)
        def _():
            self._copy_whole(sequence, first_tile, 0)

        def finish_last():
            @pl.when(tiles > 0)
            def _():
                self._copy_last(sequence, _wait)
                visit_last(LAST, tiles - 1)

            @pl.when(has_following)
            def _():
                self._copy_last(following, _start)

        if not self.ascending:
            finish_last()

        def step(i, slot):
            @pl.when(i + 1 < full_tiles)
            def _():
                self._copy_whole(sequence, first_tile + i + 1, 1 - slot)

            self._wait_whole(slot)
            visit(slot, first_tile + i)
            return 1 - slot

        jax.lax.fori_loop(0, jnp.maximum(full_tiles, 0), step, 0)
        if self.ascending:
            finish_last()

    def _copy_whole(self, sequence, tile, slot):
        for begin in range(0, self.tile, self.page_rows):
            self._copy(sequence, tile * self.tile + begin, slot, begin, self.page_rows, _start)
            self._copy_scales(sequence, tile * self.tile + begin, slot, begin, _start)

    def _wait_whole(self, slot):
        # Semaphores count bytes, so one wait covers the copies of all pages.
        for buffer in (*self.buffers, *(self.scales.buffers if self.scales else ())):
            _wait(pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], self.semaphores.at[slot]))

    def _copy_last(self, sequence, act):
        """Copies the last tile up to the sequence's length, rounded up to whole memory tiles."""
        length = self.length(sequence)
        base = (flash_tpu.cdiv(length, self.tile) - 1) * self.tile
        unit = flash_tpu.row_tile(self.buffers[0].dtype)
        for begin in range(0, self.tile, self.page_rows):
            rows = length - base - begin

            @pl.when((rows > 0) & (length > 0))
            def _(begin=begin):
                self._copy_scales(sequence, base + begin, LAST, begin, act)

            @pl.when((rows >= self.page_rows) & (length > 0))
            def _(begin=begin):
                self._copy(sequence, base + begin, LAST, begin, self.page_rows, act)

            @pl.when((rows > 0) & (rows < self.page_rows) & (length > 0))
            def _(begin=begin, rows=rows):
                # Copies have static sizes, so issue one copy per set bit of the number of rows.
                units = flash_tpu.cdiv(rows, unit)
                for bit in reversed(range((self.page_rows // unit).bit_length())):

                    @pl.when((units >> bit) & 1 == 1)
                    def _(bit=bit):
                        skip = ((units >> (bit + 1)) << (bit + 1)) * unit
                        size = unit << bit
                        self._copy(sequence, base + begin + skip, LAST, begin + skip, size, act)

    def _copy(self, sequence, row, slot, begin, rows, act):
        """Copies `rows` rows, starting at `row` of the sequence, to a buffer's row `begin`."""
        where = (slot, slice(None), pl.ds(begin, rows))
        for source, buffer in zip(self.source(sequence, row, rows), self.buffers, strict=True):
            act(pltpu.make_async_copy(source, buffer.at[where], self.semaphores.at[slot]))

    def _copy_scales(self, sequence, row, slot, begin, act):
        """Copies the scales of the page that begins at `row`, if rows are quantized."""
        if self.scales is None:
            return
        where = (slot, slice(None), slice(None), pl.ds(begin, self.page_rows))
        for source, buffer in zip(
            self.scales.source(sequence, row), self.scales.buffers, strict=True
        ):
            act(pltpu.make_async_copy(source, buffer.at[where], self.semaphores.at[slot]))


def _start(copy):
    copy.start()


def _wait(copy):
    copy.wait()
