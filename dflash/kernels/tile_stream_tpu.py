"""Keys and values of one sequence after another, tile by tile, while the last tile is worked on.

The last tile of a sequence comes first: it is the one that may be partly filled, and the one that a
paged cache adds rows to. All others are whole, so their loop needs no masks. The last tile has a
buffer of its own, so that the next sequence's is on its way as soon as this one's has been seen.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu
from dflash.kernels import quantized as quantized
from dflash.kernels.quantized import Quantised, Rows

BUFFERS = 3
LAST = 2


@dataclasses.dataclass(frozen=True)
class TileScales:
    """What a stream of quantized rows has beside them.

    Attributes:
      buffers: of keys and of values, each float32 [3, K, 1, tile] in VMEM; of latents one.
      source: (sequence, first row of a piece) -> the piece's scales for each buffer, [K, 1, piece]
        in HBM. Lanes are not cut, so a piece's scales come whole.
      dtype: to multiply in.
    """

    buffers: tuple[jax.Ref, ...]
    source: Callable
    dtype: jnp.dtype

    @staticmethod
    def scratch(heads: int, tile: int, kinds: int = 2) -> list:
        """Scratch shapes of the buffers."""
        return [pltpu.VMEM((BUFFERS, heads, 1, tile), jnp.float32)] * kinds


@dataclasses.dataclass(frozen=True)
class TileStream:
    """Double-buffered copies from HBM.

    Attributes:
      buffers: of keys and of values, each [3, K, tile, H] in VMEM: two for whole tiles, and one for
        last tiles. Latents have one of both: a value is the beginning of its key.
      semaphores: [3], one per buffer.
      source: (sequence, first row, number of rows) -> the rows for each buffer, [K, rows, H] in
        HBM. They lie within one piece.
      piece: rows that lie together in HBM; a tile is a whole number of pieces.
      length: sequence -> rows in use.
      scales: of quantized rows; None for others.
      value_width: of latents, numbers of a value.
    """

    buffers: tuple[jax.Ref, ...]
    semaphores: jax.Ref
    source: Callable
    piece: int
    length: Callable
    scales: TileScales | None = None
    value_width: int | None = None

    @staticmethod
    def scratch(heads: int, tile: int, width: int, dtype: jnp.dtype, kinds: int = 2) -> list:
        """Scratch shapes of the buffers, and that of the semaphores."""
        buffers = pltpu.VMEM((BUFFERS, heads, tile, width), dtype)
        return [*[buffers] * kinds, pltpu.SemaphoreType.DMA((BUFFERS,))]

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.buffers[0].shape[2]

    def rows(self, kind: int, half, head) -> Rows:
        """The tile of keys (kind 0) or values (1) of a head in a buffer: [tile, H]."""
        if self.value_width is None:
            return self._rows(kind, half, head)
        keys = self._rows(0, half, 0)
        return quantized.leading(keys, self.value_width) if kind else keys

    def _rows(self, kind, half, head) -> Rows:
        values = self.buffers[kind][half, head]
        if self.scales is None:
            return values
        return Quantised(values.astype(self.scales.dtype), self.scales.buffers[kind][half, head])

    def open(self, sequence) -> None:
        """Starts the very first copy; later sequences are announced to `run`."""
        self._copy_last(sequence, _start)

    def run(self, sequence, following, has_following, first_tile, visit_last, visit) -> None:
        """Visits the tiles of a sequence; of a sequence without rows, none.

        Args:
          sequence: index.
          following: index of the sequence that is to come next.
          has_following: bool; whether there is one.
          first_tile: tiles before it are left out, the last one excepted.
          visit_last: called with the buffer and the index of the last tile, whose rows at and past
            the sequence's length hold anything.
          visit: called with the buffer and the index of every other tile.
        """
        tiles = flash_tpu.cdiv(self.length(sequence), self.tile)
        first_tile = jnp.minimum(first_tile, tiles - 1)
        whole = tiles - 1 - first_tile

        @pl.when(whole > 0)
        def _():
            self._copy_whole(sequence, first_tile, 0)

        @pl.when(tiles > 0)
        def _():
            self._copy_last(sequence, _wait)
            visit_last(LAST, tiles - 1)

        @pl.when(has_following)
        def _():
            self._copy_last(following, _start)

        def step(i, half):
            @pl.when(i + 1 < whole)
            def _():
                self._copy_whole(sequence, first_tile + i + 1, 1 - half)

            self._wait_whole(half)
            visit(half, first_tile + i)
            return 1 - half

        jax.lax.fori_loop(0, jnp.maximum(whole, 0), step, 0)

    def _copy_whole(self, sequence, tile, half):
        for begin in range(0, self.tile, self.piece):
            self._copy(sequence, tile * self.tile + begin, half, begin, self.piece, _start)
            self._copy_scales(sequence, tile * self.tile + begin, half, begin, _start)

    def _wait_whole(self, half):
        # Semaphores count bytes: one wait serves all pieces.
        for buffer in (*self.buffers, *(self.scales.buffers if self.scales else ())):
            _wait(pltpu.make_async_copy(buffer.at[half], buffer.at[half], self.semaphores.at[half]))

    def _copy_last(self, sequence, act):
        """The last tile up to the sequence's length, rounded up to whole tiles of memory."""
        length = self.length(sequence)
        base = (flash_tpu.cdiv(length, self.tile) - 1) * self.tile
        unit = flash_tpu.row_tile(self.buffers[0].dtype)
        for begin in range(0, self.tile, self.piece):
            rows = length - base - begin

            @pl.when((rows > 0) & (length > 0))
            def _(begin=begin):
                self._copy_scales(sequence, base + begin, LAST, begin, act)

            @pl.when((rows >= self.piece) & (length > 0))
            def _(begin=begin):
                self._copy(sequence, base + begin, LAST, begin, self.piece, act)

            @pl.when((rows > 0) & (rows < self.piece) & (length > 0))
            def _(begin=begin, rows=rows):
                # A copy's size is static, so the rows are copied by the bits of their number.
                units = flash_tpu.cdiv(rows, unit)
                for bit in reversed(range((self.piece // unit).bit_length())):

                    @pl.when((units >> bit) & 1 == 1)
                    def _(bit=bit):
                        skip = ((units >> (bit + 1)) << (bit + 1)) * unit
                        size = unit << bit
                        self._copy(sequence, base + begin + skip, LAST, begin + skip, size, act)

    def _copy(self, sequence, row, half, begin, rows, act):
        """`rows` rows from `row` of the sequence on, to a buffer from `begin` on."""
        where = (half, slice(None), pl.ds(begin, rows))
        for source, buffer in zip(self.source(sequence, row, rows), self.buffers, strict=True):
            act(pltpu.make_async_copy(source, buffer.at[where], self.semaphores.at[half]))

    def _copy_scales(self, sequence, row, half, begin, act):
        """The scales of the piece that begins with `row`, if there are any."""
        if self.scales is None:
            return
        where = (half, slice(None), slice(None), pl.ds(begin, self.piece))
        for source, buffer in zip(
            self.scales.source(sequence, row), self.scales.buffers, strict=True
        ):
            act(pltpu.make_async_copy(source, buffer.at[where], self.semaphores.at[half]))


def _start(copy):
    copy.start()


def _wait(copy):
    copy.wait()
