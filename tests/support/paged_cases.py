"""Sequences in a paged cache, and what attention over them should be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import quantized
from dflash.kernels.quantized import Quantized
from support.dense import assert_close, dense_attention

SCALE = 0.3
STALE = 1e6  # what rows hold that no sequence has written: it must never show in an output


@dataclasses.dataclass
class Case:
    """Sequences with `start[b]` cached rows and T new ones."""

    arguments: dict[str, jax.Array]
    expected: np.ndarray
    page_size: int
    owned: np.ndarray  # bool [P, S]; rows that the call must write

    def check(self, result, tolerance, *, stale_unit=1, counts=None):
        """Compares outputs and pools; stale rows up to a multiple of the unit may be cleared.

        With counts, only so many new rows of each sequence are compared.
        """
        outputs, key_pages, value_pages = result
        assert outputs.dtype == self.arguments["queries"].dtype
        batch, length = outputs.shape[:2]
        own = np.arange(length) < np.reshape(
            [length] * batch if counts is None else counts, (-1, 1)
        )
        assert_close(np.asarray(outputs)[own], self.expected[own], tolerance)
        for after, name, rows in (
            (key_pages, "key_pages", "keys"),
            (value_pages, "value_pages", "values"),
        ):
            before, new = self.arguments[name], np.asarray(self.arguments[rows])
            new = _encode(new.transpose(2, 0, 1, 3), before)
            assert jax.tree.structure(after) == jax.tree.structure(before)
            for was, now, row in zip(*map(row_parts, (before, after, new)), strict=True):
                same = ~self.owned & ~self._beside(stale_unit)
                np.testing.assert_array_equal(now[:, same], was[:, same])
                np.testing.assert_array_equal(now[:, self.pages[own], self.rows[own]], row[:, own])

    def poison(self, unit):
        """Puts NaN, which no mask would stop, into all rows past the starts, rounded up."""
        read = np.zeros_like(self.owned)
        for row, start in zip(
            np.asarray(self.arguments["page_table"]), self.arguments["start"].tolist(), strict=True
        ):
            positions = np.arange(-(-start // unit) * unit)
            read[row[positions // self.page_size], positions % self.page_size] = True
        for name in ("key_pages", "value_pages"):
            pool = self.arguments[name]
            if isinstance(pool, Quantized):
                values, scales = pool.values, _poisoned(pool.scales, read[:, None])
                if values.dtype != jnp.int8:  # which has no NaN
                    values = _poisoned(values, read[:, :, None])
                self.arguments[name] = Quantized(values, scales)
            else:
                self.arguments[name] = _poisoned(pool, read[:, :, None])

    def _beside(self, unit):
        beside = np.zeros_like(self.owned)
        for page, row in np.argwhere(self.owned):
            first = row // unit * unit
            beside[page, row : first + unit] = True
        return beside

    @property
    def pages(self):
        table = np.asarray(self.arguments["page_table"])
        return np.take_along_axis(table, self._positions() // self.page_size, axis=1)

    @property
    def rows(self):
        return self._positions() % self.page_size

    def _positions(self):
        length = self.arguments["queries"].shape[1]
        return np.asarray(self.arguments["start"])[:, None] + np.arange(length)


def _encode(rows, pool):
    """Returns `quantized.encode`; outside a program each of its operations compiles one."""
    return jax.jit(quantized.encode)(rows, pool) if isinstance(pool, Quantized) else rows


def _poisoned(pool, read):
    # Not on the device, where each shape compiles a program.
    values = np.array(pool)
    values[np.broadcast_to(~read, values.shape)] = np.nan
    return jnp.asarray(values)


def make_case(
    starts, length, *, group=2, kv_heads=2, width=8, page_size=4, table_pages=None,
    tree_mask=None, window=None, sinks=False, dtype=jnp.float32, kv_dtype=None, seed=0,
):  # fmt: skip
    """Random arguments whose pages lie in any order, and what dense attention makes of them.

    Pages are quantized where a kv_dtype is named; dense attention then sees what they stand for.
    The caller passes the window to the kernel too.
    """
    rng = np.random.default_rng(seed)
    batch = len(starts)
    needed = -(-(max(starts) + length) // page_size)
    table_pages = table_pages or needed
    num_pages = batch * table_pages + 2  # one scratch page, one without an owner
    table = rng.permutation(np.arange(1, batch * table_pages + 1)).reshape(batch, table_pages)
    heads = kv_heads * group

    def draw(*shape):
        return rng.normal(size=shape).astype(dtype).astype(np.float64)

    queries = draw(batch, length, heads, width)
    keys, values = (draw(batch, max(starts) + length, kv_heads, width) for _ in range(2))
    new = [
        np.stack([rows[b, start : start + length] for b, start in enumerate(starts)])
        for rows in (keys, values)
    ]
    like = jnp.zeros(0, kv_dtype or dtype)
    like = like if kv_dtype is None else Quantized(like, jnp.zeros(0))
    stored = [_encode(rows.astype(dtype), like) for rows in (keys, values)]
    keys, values = (np.prod(np.broadcast_arrays(*row_parts(rows)), axis=0) for rows in stored)
    key_pages, value_pages = (
        _lay_out(rows, starts, table, num_pages, page_size) for rows in stored
    )
    sink_scores = 2 * rng.normal(size=heads).astype(np.float32) if sinks else None
    owned = np.zeros((num_pages, page_size), bool)
    expected = np.zeros((batch, length, heads, width))
    for b, start in enumerate(starts):
        for position in range(start, start + length):
            owned[table[b, position // page_size], position % page_size] = True
        inside = np.tril(np.ones((length, length), bool)) if tree_mask is None else tree_mask[b]
        visible = np.concatenate([np.ones((length, start), bool), inside], axis=1)
        if window is not None:
            depth = inside.sum(axis=1) - 1
            positions = np.concatenate([np.arange(start), start + depth])
            visible &= start + depth[:, None] - positions < window
        expected[b] = dense_attention(
            queries[b], keys[b, : start + length], values[b, : start + length], visible, SCALE,
            sink_scores,
        )  # fmt: skip
    arguments = {
        "queries": jnp.asarray(queries.astype(dtype)), "keys": jnp.asarray(new[0].astype(dtype)),
        "values": jnp.asarray(new[1].astype(dtype)), "key_pages": key_pages,
        "value_pages": value_pages, "page_table": jnp.asarray(table.astype(np.int32)),
        "start": jnp.asarray(np.array(starts, np.int32)),
    }  # fmt: skip
    if tree_mask is not None:
        arguments["tree_mask"] = jnp.asarray(tree_mask)
    if sinks:
        arguments["sinks"] = jnp.asarray(sink_scores)
    return Case(arguments, expected, page_size, owned)


def row_parts(rows):
    """The numbers of rows [..., S, ·], and their scales if they have any."""
    parts = (rows.values, rows.scales.mT) if isinstance(rows, Quantized) else (rows,)
    # NumPy's comparisons do not know NaN in bfloat16.
    return [np.asarray(part, np.float32) for part in parts]


def _lay_out(rows, starts, table, num_pages, page_size):
    """Pages [K, P, S, H] with the first rows of [B, L, K, H], as these are stored."""
    parts = []
    for part in row_parts(rows):
        # What eight bits can hold is stale enough, times a stale scale.
        stale = 100 if isinstance(rows, Quantized) and part.shape[-1] > 1 else STALE
        pages = np.full((part.shape[2], num_pages, page_size, part.shape[3]), stale, np.float32)
        for b, start in enumerate(starts):
            for position in range(start):
                page = table[b, position // page_size]
                pages[:, page, position % page_size] = part[b, position]
        parts.append(pages.astype(rows.dtype if len(parts) == 0 else np.float32))
    pools = [jnp.asarray(parts[0]), *(jnp.asarray(scales.mT) for scales in parts[1:])]
    return Quantized(*pools) if len(pools) > 1 else pools[0]
