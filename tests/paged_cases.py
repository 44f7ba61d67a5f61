"""Sequences in a paged cache, and what attention over them should be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from dense import dense_attention

SCALE = 0.3
STALE = 1e6  # what slots hold that no sequence has written: it must never shine through


@dataclasses.dataclass
class Case:
    """Sequences with `start[b]` cached rows and T new ones."""

    arguments: dict[str, jax.Array]
    expected: np.ndarray
    page_size: int
    owned: np.ndarray  # bool [P, S]; slots that the call must write
    view: dict

    def check(self, result, tolerance, *, stale_unit=1):
        """Compares outputs and pools; stale slots up to a multiple of the unit may be cleared."""
        outputs, key_pages, value_pages = result
        assert outputs.dtype == self.arguments["queries"].dtype
        np.testing.assert_allclose(
            np.asarray(outputs, np.float64), self.expected, rtol=tolerance, atol=tolerance
        )
        for after, name, rows in (
            (key_pages, "key_pages", "keys"),
            (value_pages, "value_pages", "values"),
        ):
            # bfloat16 of numpy's has no idea of NaN.
            before, after = (np.asarray(x, np.float32) for x in (self.arguments[name], after))
            same = ~self.owned & ~self._beside(stale_unit)
            np.testing.assert_array_equal(after[:, same], before[:, same])
            written = after[:, self.pages, self.slots]
            new = np.asarray(self.arguments[rows], np.float32).transpose(2, 0, 1, 3)
            np.testing.assert_array_equal(written, new)

    def poison(self, unit):
        """Puts NaN, which no mask would stop, into all slots past the starts, rounded up."""
        read = np.zeros_like(self.owned)
        for row, start in zip(
            np.asarray(self.arguments["page_table"]), self.arguments["start"].tolist(), strict=True
        ):
            slots = np.arange(-(-start // unit) * unit)
            read[row[slots // self.page_size], slots % self.page_size] = True
        for name in ("key_pages", "value_pages"):
            pool = self.arguments[name]
            self.arguments[name] = jnp.where(read[:, :, None], pool, jnp.nan).astype(pool.dtype)

    def _beside(self, unit):
        beside = np.zeros_like(self.owned)
        for page, slot in np.argwhere(self.owned):
            first = slot // unit * unit
            beside[page, slot : first + unit] = True
        return beside

    @property
    def pages(self):
        table = np.asarray(self.arguments["page_table"])
        return np.take_along_axis(table, self._positions() // self.page_size, axis=1)

    @property
    def slots(self):
        return self._positions() % self.page_size

    def _positions(self):
        length = self.arguments["queries"].shape[1]
        return np.asarray(self.arguments["start"])[:, None] + np.arange(length)


def make_case(
    starts, length, *, group=2, kv_heads=2, width=8, page_size=4, table_pages=None,
    tree_mask=None, window=None, soft_cap=None, dtype=jnp.float32, seed=0,
):  # fmt: skip
    """Random arguments whose pages lie in any order, and what dense attention makes of them."""
    rng = np.random.default_rng(seed)
    batch = len(starts)
    needed = -(-(max(starts) + length) // page_size)
    table_pages = table_pages or needed
    num_pages = batch * table_pages + 2  # one scratch page, one that nobody owns
    table = rng.permutation(np.arange(1, batch * table_pages + 1)).reshape(batch, table_pages)
    heads = kv_heads * group

    def draw(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=shape), dtype), np.float64)

    queries = draw(batch, length, heads, width)
    keys, values = (draw(batch, max(starts) + length, kv_heads, width) for _ in range(2))
    key_pages, value_pages = (
        np.full((kv_heads, num_pages, page_size, width), STALE) for _ in range(2)
    )
    owned = np.zeros((num_pages, page_size), bool)
    expected = np.zeros((batch, length, heads, width))
    new_keys, new_values = (np.zeros((batch, length, kv_heads, width)) for _ in range(2))
    for b, start in enumerate(starts):
        for slot in range(start):
            page = table[b, slot // page_size]
            key_pages[:, page, slot % page_size] = keys[b, slot]
            value_pages[:, page, slot % page_size] = values[b, slot]
        for slot in range(start, start + length):
            owned[table[b, slot // page_size], slot % page_size] = True
        new_keys[b] = keys[b, start : start + length]
        new_values[b] = values[b, start : start + length]
        inside = np.tril(np.ones((length, length), bool)) if tree_mask is None else tree_mask[b]
        visible = np.concatenate([np.ones((length, start), bool), inside], axis=1)
        if window is not None:
            depth = inside.sum(axis=1) - 1
            positions = np.concatenate([np.arange(start), start + depth])
            visible &= positions > (start + depth - window)[:, None]
        expected[b] = dense_attention(
            queries[b], keys[b, : start + length], values[b, : start + length], visible, SCALE,
            soft_cap,
        )  # fmt: skip
    arguments = {
        "queries": jnp.asarray(queries, dtype),
        "keys": jnp.asarray(new_keys, dtype),
        "values": jnp.asarray(new_values, dtype),
        "key_pages": jnp.asarray(key_pages, dtype),
        "value_pages": jnp.asarray(value_pages, dtype),
        "page_table": jnp.asarray(table, jnp.int32),
        "start": jnp.asarray(starts, jnp.int32),
    }
    if tree_mask is not None:
        arguments["tree_mask"] = jnp.asarray(tree_mask)
    view = {"scale": SCALE, "window": window, "soft_cap": soft_cap}
    return Case(arguments, expected, page_size, owned, view)


def ancestry(parents):
    """Mask of the tree in which row g + 1 continues row parents[g]: each sees its ancestors."""
    seen = np.eye(len(parents) + 1, dtype=bool)
    for draft, parent in enumerate(parents):
        seen[draft + 1] |= seen[parent]
    return seen
