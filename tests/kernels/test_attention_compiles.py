"""Tests that the attention kernels compile for every TPU and every kind of shape."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from support.tpu_compiler import CHIPS, compile_for

from dflash.kernels.anchored_attention import anchored_attention
from dflash.kernels.block_attention import block_attention
from dflash.kernels.causal_attention import causal_attention
from dflash.kernels.packing import Packing
from dflash.kernels.paged_attention import move_rows, packed_attention, paged_attention, row_index
from dflash.kernels.quantized import Quantized
from dflash.kernels.split_heads import Part, split_heads

pytestmark = pytest.mark.tpu_compiler

BF16, F32 = jnp.bfloat16, jnp.float32
V5P = CHIPS[1]


def paged_shapes(length, kv_heads, group, width, dtype, page=128, batch=2, pages=8, tree=False):
    pool = (kv_heads, batch * pages + 1, page, width), dtype
    new = (batch, length, kv_heads, width), dtype
    queries = (batch, length, kv_heads * group, width), dtype
    shapes = [queries, new, new, pool, pool, ((batch, pages), jnp.int32), ((batch,), jnp.int32)]
    return [*shapes, ((batch, length, length), jnp.bool_)] if tree else shapes


@pytest.mark.parametrize(
    ("chip", "length", "kv_heads", "group", "width", "dtype", "tree"),
    [
        *((chip, 16, 8, 4, 128, BF16, False) for chip in CHIPS),
        (V5P, 1, 8, 4, 128, BF16, False),
        (V5P, 1, 1, 1, 64, F32, False),
        (V5P, 2, 1, 4, 256, BF16, False),
        (V5P, 15, 2, 8, 64, BF16, False),
        (V5P, 17, 2, 1, 128, BF16, False),
        (V5P, 64, 2, 4, 128, F32, False),
        (V5P, 1024, 2, 4, 128, BF16, False),
        (V5P, 33, 2, 4, 128, BF16, True),
    ],
)
def test_paged_attention(chip, length, kv_heads, group, width, dtype, tree):
    shapes = paged_shapes(length, kv_heads, group, width, dtype, pages=16, tree=tree)
    compile_for(chip, functools.partial(paged_attention, scale=0.1), shapes)


@pytest.mark.parametrize("kv_dtype", [BF16, jnp.int8])
def test_a_tree_s_rows_move_within_their_pool(kv_dtype):
    """A pool is updated in place, since no program has memory for a copy of it."""
    shapes = paged_shapes(17, 8, 4, 128, BF16, batch=16, pages=16, tree=True)
    pool, _ = shapes[3]
    pages = jax.ShapeDtypeStruct(pool, kv_dtype)
    if kv_dtype == jnp.int8:
        pages = Quantized(pages, jax.ShapeDtypeStruct((*pool[:2], 1, pool[2]), F32))
    pools, form = jax.tree.flatten((pages, pages))

    def call(*arrays):
        pools = jax.tree.unflatten(form, arrays[: len(arrays) - 7])
        *new, table, start, tree, path = arrays[-7:]
        _, *pools = paged_attention(*new, *pools, table, start, tree, scale=0.1)
        source, target = (
            row_index(table, start[:, None] + rows, 128) for rows in (path, jnp.arange(8)[None])
        )
        return [move_rows(pages, source, target) for pages in pools]

    shapes = [*((leaf.shape, leaf.dtype) for leaf in pools), *shapes[:3], *shapes[5:]]
    shapes.append(((16, 8), jnp.int32))
    donated = tuple(range(len(pools)))
    memory = compile_for(V5P, call, shapes, donate=donated).memory_analysis()
    assert memory.temp_size_in_bytes < math.prod(pool) // 2


@pytest.mark.parametrize(
    ("chip", "kv_dtype", "length", "heads", "width", "dtype", "tree"),
    [
        *((chip, jnp.int8, 16, (8, 4), 128, BF16, False) for chip in CHIPS),
        *((chip, jnp.float8_e4m3fn, 16, (8, 4), 128, BF16, False) for chip in CHIPS),
        (V5P, jnp.int8, 1, (2, 2), 64, F32, False),
        (V5P, jnp.float8_e4m3fn, 17, (2, 2), 256, BF16, True),
        (V5P, jnp.int8, 512, (2, 2), 128, BF16, False),
    ],
)
def test_quantized_paged_attention(chip, kv_dtype, length, heads, width, dtype, tree):
    shapes = paged_shapes(length, *heads, width, dtype, tree=tree)
    (kv_heads, num_pages, page, width), _ = shapes[3]
    shapes[3:5] = [((kv_heads, num_pages, page, width), kv_dtype)] * 2
    shapes += [((kv_heads, num_pages, 1, page), F32)] * 2

    def call(*arrays):
        *plain, key_scales, value_scales = arrays
        plain[3:5] = Quantized(plain[3], key_scales), Quantized(plain[4], value_scales)
        return paged_attention(*plain, scale=0.1)

    compile_for(chip, call, shapes)


@pytest.mark.parametrize(
    ("chip", "length", "total", "kv_heads", "group", "batch", "dtype", "tree"),
    [
        *((chip, 16, 64, 8, 4, 16, BF16, False) for chip in CHIPS),
        (V5P, 4, 10, 8, 4, 4, BF16, False),
        (V5P, 5, 12, 1, 1, 4, F32, True),
        (V5P, 33, 40, 2, 8, 4, BF16, True),
    ],
)
def test_packed_attention(chip, length, total, kv_heads, group, batch, dtype, tree):
    padded = paged_shapes(length, kv_heads, group, 128, dtype, batch=batch, tree=tree)
    packed = [((1, total, *shape[2:]), dtype) for shape, dtype in padded[:3]]

    def call(counts, *arrays):
        packing = Packing.of(counts, length, total, 1)
        return packed_attention(*arrays[:7], packing, *arrays[7:], scale=0.1)

    compiled = compile_for(chip, call, [((batch,), jnp.int32), *packed, *padded[3:]])
    assert "paged_attention_packed" in compiled.as_text()


def block_shapes(rows, kv_heads, group, width, dtype, batch=2, capacity=1024):
    new = (batch, rows, kv_heads, width), dtype
    context = (batch, kv_heads, capacity, width), dtype
    queries = (batch, rows, kv_heads * group, width), dtype
    return [queries, new, new, context, context, ((batch,), jnp.int32)]


@pytest.mark.parametrize(
    ("chip", "rows", "kv_heads", "group", "width", "dtype", "view"),
    [
        *((chip, 16, 8, 4, 128, BF16, {"window": 64}) for chip in CHIPS),
        (V5P, 1, 2, 4, 64, F32, {"causal": True}),
        (V5P, 10, 1, 8, 256, BF16, {"causal": True}),
        (V5P, 17, 2, 1, 128, F32, {"causal": True}),
    ],
)
def test_block_attention(chip, rows, kv_heads, group, width, dtype, view):
    call = functools.partial(block_attention, scale=0.1, **view)
    capacity = 64 if "causal" in view else 1024
    compile_for(chip, call, block_shapes(rows, kv_heads, group, width, dtype, capacity=capacity))


def test_block_attention_with_windows_of_the_sequences():
    def call(*arrays):
        return block_attention(*arrays[:-1], windows=arrays[-1], scale=0.1)

    shapes = block_shapes(16, 8, 4, 128, BF16)
    compile_for(V5P, call, [*shapes, shapes[-1]])


def anchored_shapes(blocks, rows, kv_heads, group, width, length, dtype):
    own = (1, blocks, rows, kv_heads, width), dtype
    context = (1, length, kv_heads, width), dtype
    places = ((1, blocks), jnp.int32), ((1, blocks), jnp.bool_), ((1, length), jnp.int32)
    return [
        ((1, blocks, rows, kv_heads * group, width), dtype), own, own, context, context, *places,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("chip", "blocks", "rows", "kv_heads", "group", "width", "dtype"),
    [
        *[(chip, 32, 16, 2, 4, 128, BF16) for chip in CHIPS],
        (V5P, 9, 10, 1, 8, 64, BF16),
        (V5P, 5, 8, 2, 1, 256, F32),
    ],
)
def test_anchored_attention_and_its_gradients(chip, blocks, rows, kv_heads, group, width, dtype):
    def gradients(*arrays):
        def total(floats):
            attended = anchored_attention(*floats, *arrays[5:], scale=0.1, window=512)
            return attended.astype(F32).sum()

        return jax.grad(total)(arrays[:5])

    shapes = anchored_shapes(blocks, rows, kv_heads, group, width, 1500, dtype)
    compile_for(chip, gradients, shapes)


def split(rows, cos, sin, *scales, group=4):
    parts = Part(group), Part(), Part(rotated=False, normed=False)
    return split_heads(rows, (cos, sin), scales, parts=parts)


def split_shapes(length, kv_heads, group, width, dtype, batch=2):
    angles = (batch, length, 1, width // 2), F32
    columns = kv_heads * (group + 2) * width
    return [((batch, length, columns), dtype), angles, angles, *[((width,), dtype)] * 2]


@pytest.mark.parametrize(
    ("chip", "length", "kv_heads", "group", "width", "dtype"),
    [
        *((chip, 16, 8, 4, 128, BF16) for chip in CHIPS),
        (V5P, 1, 1, 8, 128, BF16),
        (V5P, 15, 3, 1, 128, F32),
        (V5P, 1024, 8, 4, 128, F32),
        (V5P, 1024, 8, 4, 256, BF16),
    ],
)
def test_split_heads(chip, length, kv_heads, group, width, dtype):
    call = functools.partial(split, group=group)
    compile_for(chip, call, split_shapes(length, kv_heads, group, width, dtype))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("norms", [0, 1])
def test_split_heads_and_its_gradients(chip, norms):
    def call(rows, cos, sin, *scales):
        heads, pull = jax.vjp(lambda *x: split_heads(x[0], (cos, sin), x[1:])[0], rows, *scales)
        return pull(heads)

    shapes = split_shapes(1024, 1, 4, 128, BF16)[: 3 + norms]
    text = compile_for(chip, call, shapes).as_text()
    assert "split_heads_columns_gradients" in text


@pytest.mark.parametrize("chip", CHIPS)
def test_causal_attention_and_its_gradients(chip):
    def call(*arrays):
        *rows, segment_ids = arrays
        attend = functools.partial(causal_attention, segment_ids=segment_ids, scale=0.1)
        return jax.vjp(attend, *rows)[1](rows[0])

    rows, kv_rows = ((2, 1152, heads, 128) for heads in (8, 2))
    shapes = [(rows, BF16), (kv_rows, BF16), (kv_rows, BF16), (rows[:2], jnp.int32)]
    compile_for(chip, call, shapes)
