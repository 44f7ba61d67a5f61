import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_sharding, zeros
from support.paged_cases import row_parts

from dflash.config import schema
from dflash.layers import cache as kv
from dflash.parallel import sharding as shardings


def make_paged(batch=2, *, shares=1, sharding=None, kv_dtype=None, specs=None):
    """Returns a cache of two layers in which each row, or each row's scale, is a unique number."""
    rows, pages = kv.CacheArray(2, 4, "kv_heads"), 3
    abstract = kv.paged_cache(
        specs or [(rows, rows)] * 2, batch=batch, pages_per_sequence=pages,
        num_pages=shares * (batch // shares * pages + 1), page_size=4,
        dtype=kv_dtype or jnp.float32, quantized=kv_dtype is not None,
        sharding=sharding or make_sharding(),
    )  # fmt: skip
    pools, form = jax.tree.flatten(abstract.layers)
    numbers = [
        jax.device_put(
            (np.arange(pool.size).reshape(pool.shape) % most + 1e4 * i % most).astype(pool.dtype),
            pool.sharding,
        )
        for i, pool in enumerate(pools)
        for most in [100 if pool.dtype == jnp.int8 else 1e9]
    ]
    # Allocate the pages of each shard from the last one downwards.
    local = batch // shares * pages
    table = np.tile(np.arange(local, 0, -1), shares).reshape(batch, pages)
    table = jax.device_put(table.astype(np.int32), abstract.page_table.sharding)
    layers = jax.tree.unflatten(form, numbers)
    return dataclasses.replace(abstract, layers=layers, page_table=table)


def rows_of(pages, table, page_base=0):
    """Returns a sequence's rows [K, positions, H] in order of position."""
    picked = np.asarray(pages)[:, page_base + np.asarray(table)]
    return picked.reshape(picked.shape[0], -1, picked.shape[-1])


def check_compacted(before, after, start, path, shares=1):
    batch = len(start)
    per_share = before.pools[0].shape[1] // shares
    olds, news = (
        [part for pool in cache.pools for part in row_parts(pool)] for cache in (before, after)
    )
    for old, new in zip(olds, news, strict=True):
        expected_pool = np.array(old)
        for b in range(batch):
            base = b // (batch // shares) * per_share
            expected = rows_of(old, before.page_table[b], base).copy()
            for i, row in enumerate(path[b]):
                expected[:, start[b] + i] = rows_of(old, before.page_table[b], base)[
                    :, start[b] + row
                ]
            np.testing.assert_array_equal(rows_of(new, after.page_table[b], base), expected)
            paged = expected.reshape(expected.shape[0], -1, old.shape[2], expected.shape[-1])
            expected_pool[:, base + np.asarray(before.page_table[b])] = paged
        # This includes the scratch page and all other pages, which are unchanged.
        np.testing.assert_array_equal(new, expected_pool)


def test_compact_moves_an_accepted_path():
    cache = make_paged()
    start, path = [2, 7], [[0, 2, 4, 4], [0, 1, 3, 4]]
    after = cache.compact(jnp.array(start), jnp.array(path), make_sharding())
    check_compacted(cache, after, start, path)
    # Check one row explicitly: position 10 moves to row 2 of sequence 1's tree (position 9).
    np.testing.assert_array_equal(
        rows_of(after.pools[0], after.page_table[1])[:, 9],
        rows_of(cache.pools[0], cache.page_table[1])[:, 10],
    )


def test_compact_of_a_chain_changes_nothing():
    cache = make_paged()
    path = jnp.broadcast_to(jnp.arange(5), (2, 5))
    after = cache.compact(jnp.array([0, 6]), path, make_sharding())
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def check_compact(cache, sharding):
    """Moves the accepted paths of four sequences, one of each share."""
    start, path = [2, 7, 0, 3], [[0, 2, 4], [0, 1, 3], [0, 3, 4], [0, 2, 2]]
    compact = jax.jit(lambda *args: cache.compact(*args, sharding))
    after = compact(jnp.array(start), jnp.array(path))
    check_compacted(cache, after, start, path, shares=4)


@pytest.mark.parametrize("kv_dtype", [None, jnp.int8])
def test_compact_on_eight_devices(kv_dtype):
    sharding = make_sharding(data=2, fsdp=2, tensor=2)
    cache = make_paged(batch=4, shares=4, sharding=sharding, kv_dtype=kv_dtype)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(cache.layers))
    check_compact(cache, sharding)


MIXED = [
    (kv.CacheArray(2, 4, "kv_heads"),) * 2,  # Grouped-query attention.
    kv.CacheArray(1, 6, None),  # Latent attention: one array for all heads.
    {"rows": kv.CacheArray(2, 2, "kv_heads"), "of all": kv.CacheArray(3, 8, None)},
]


@pytest.mark.parametrize("kv_dtype", [None, jnp.int8])
def test_layers_keep_what_their_attention_names(kv_dtype):
    sharding = make_sharding(data=2, fsdp=2, tensor=2)
    cache = make_paged(batch=4, shares=4, sharding=sharding, kv_dtype=kv_dtype, specs=MIXED)
    assert [pool.shape for pool in cache.pools] == [
        (2, 16, 4, 4),
        (2, 16, 4, 4),
        (1, 16, 4, 6),
        (3, 16, 4, 8),  # Dictionaries are ordered by key.
        (2, 16, 4, 2),
    ]
    assert cache.axes == ("kv_heads", "kv_heads", None, None, "kv_heads")
    assert (cache.layers[1].shape, cache.layers[2]["rows"].shape) == ((1, 16, 4, 6), (2, 16, 4, 2))
    check_compact(cache, sharding)


def make_static():
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "batch": 3, "capacity": 8}
    return zeros(kv.static_cache(**sizes, dtype=jnp.bfloat16, sharding=make_sharding()))


def test_static_write():
    position = [0, 3, 5]
    rng = np.random.default_rng(0)
    # Multiples of 1/8 survive the cast to bfloat16.
    rows = [jnp.asarray(rng.integers(-64, 64, (3, 3, 2, 4)) / 8, jnp.bfloat16) for _ in range(4)]
    before = make_static()
    after = before.write(jnp.array(position), rows[:2], rows[2:])
    for i, cache in enumerate((*after.keys, *after.values)):
        assert cache.dtype == jnp.float32  # On a CPU; the rows are narrower.
        expected = np.zeros((3, 2, kv.SLOT_TILE, 4))  # The requested capacity is 8.
        for b, begin in enumerate(position):
            expected[b, :, begin : begin + 3] = rows[i][b].swapaxes(0, 1)
        np.testing.assert_array_equal(np.asarray(cache, np.float32), expected)


def test_rows_of_one_sequence_are_read_and_written_where_they_belong():
    rng = np.random.default_rng(1)
    cache = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape).astype(x.dtype)), make_static()
    )
    rows = cache.read_rows(jnp.int32(1), jnp.int32(5), 4)
    for leaf, part in zip(jax.tree.leaves(cache), jax.tree.leaves(rows), strict=True):
        np.testing.assert_array_equal(part, leaf[1, :, 5:9])
    after = make_static().write_rows(jnp.int32(2), jnp.int32(28), rows)
    for leaf, part in zip(jax.tree.leaves(after), jax.tree.leaves(rows), strict=True):
        expected = np.zeros(leaf.shape, leaf.dtype)
        expected[2, :, 28:32] = part
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(8, ("batch", "pages")), (4, ("batch", "pages")), (1, (None, None)), (6, (None, None))],
)
def test_batches_that_cannot_be_split_stay_whole(batch, expected):
    sizes = {"data": 2, "fsdp": 2, "tensor": 1}
    rules = {"batch": ("data", "fsdp")}
    sharding = shardings.make_sharding(sizes, rules, abstract=True)
    assert kv.batch_axes(batch, sharding) == expected


@pytest.mark.parametrize(
    ("elsewhere", "expected"),
    [(False, "float32"), (True, "bfloat16")],
    ids=["cpu", "elsewhere"],
)
def test_bfloat16_rows_are_kept_as_float32_on_a_cpu(elsewhere, expected):
    sharding = shardings.make_sharding({}, schema.SHARDING_RULES, abstract=elsewhere)
    paged = kv.paged_cache(
        [kv.CacheArray(2, 4, "kv_heads")], batch=2, pages_per_sequence=3, num_pages=7,
        page_size=4, dtype=jnp.bfloat16, sharding=sharding,
    )  # fmt: skip
    static = kv.static_cache(
        num_layers=1, num_kv_heads=2, head_dim=4, batch=2, capacity=8, dtype=jnp.bfloat16,
        sharding=sharding,
    )  # fmt: skip
    assert {str(rows.dtype) for rows in (*paged.pools, *jax.tree.leaves(static))} == {expected}
