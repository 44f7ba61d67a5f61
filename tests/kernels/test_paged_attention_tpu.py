"""Tests of the Pallas kernel of paged attention, in interpret mode, against dense attention.

Slots that a sequence does not use hold NaN. Each test compiles a kernel, so there are few, and each
mixes sequences without context with sequences that start around the edges of pages and tiles.
"""

import functools

import jax.numpy as jnp
import pytest
from support.interpreter import interpret
from support.paged_cases import SCALE, make_case
from support.token_trees import TREES

from dflash.kernels import flash_tpu
from dflash.kernels.paged_attention import paged_attention
from dflash.kernels.tuning import BlockSizes

BF16, F32 = jnp.bfloat16, jnp.float32


def check(case, *, keys, queries=128, window=None):
    unit = flash_tpu.row_tile(case.arguments["key_pages"].dtype)
    case.poison(unit)
    call = functools.partial(
        paged_attention,
        implementation="interpret",
        sizes=BlockSizes(keys, queries),
        scale=SCALE,
        window=window,
    )
    result = interpret(lambda arguments: call(**arguments), case.arguments)
    case.check(
        result, 2e-2 if case.arguments["queries"].dtype == BF16 else 2e-5, stale_unit=case.page_size
    )


@pytest.mark.parametrize(
    ("length", "starts", "page", "dtype", "kv_heads", "group", "width"),
    [
        (1, [0, 15, 16, 33], 16, BF16, 1, 4, 64),
        (2, [7, 15, 0], 8, F32, 1, 8, 64),
        (8, [30, 0], 16, BF16, 2, 2, 128),
        (15, [17, 1, 0], 8, F32, 3, 1, 64),
        (16, [40, 0, 32], 16, BF16, 2, 4, 128),
        (17, [63, 16], 16, F32, 1, 1, 256),
        (64, [5, 0], 32, BF16, 1, 1, 128),
    ],
)
def test_ragged_starts_and_page_edges(length, starts, page, dtype, kv_heads, group, width):
    case = make_case(
        starts, length, kv_heads=kv_heads, group=group, width=width, page_size=page, dtype=dtype
    )
    check(case, keys=2 * page)


def test_long_prompts_take_several_tiles_of_queries():
    case = make_case([9, 0], 37, kv_heads=1, width=64, page_size=8)
    check(case, keys=16, queries=16)


def test_trees():
    case = make_case([0, 19, 8], 6, kv_heads=1, width=64, page_size=8, tree_mask=TREES)
    check(case, keys=8)


@pytest.mark.parametrize(
    ("length", "starts", "window", "queries"),
    [
        (1, [0, 8, 16, 33], 5, 128),
        (5, [23, 16, 0], 3, 128),
        (5, [40, 7], 1, 128),
        (37, [41, 0], 20, 16),
        (37, [9], 7, 16),
    ],
)
def test_windows_and_sinks(length, starts, window, queries):
    case = make_case(starts, length, kv_heads=2, width=64, page_size=8, window=window, sinks=True)
    check(case, keys=8, queries=queries, window=window)


@pytest.mark.parametrize(
    ("length", "starts", "kv_heads", "group", "dtype", "kv_dtype", "queries"),
    [
        (1, [0, 127, 128, 300], 2, 4, F32, "int8", 128),
        (16, [0, 120, 256], 1, 2, BF16, "float8_e4m3fn", 128),
        (17, [130, 0, 111], 2, 1, F32, "float8_e4m3fn", 128),
        (37, [250, 0], 1, 1, F32, "int8", 16),
    ],
)
def test_quantized_pages(length, starts, kv_heads, group, dtype, kv_dtype, queries):
    case = make_case(
        starts, length, kv_heads=kv_heads, group=group, width=64, page_size=128, table_pages=4,
        dtype=dtype, kv_dtype=kv_dtype,
    )  # fmt: skip
    check(case, keys=256, queries=queries)


def test_trees_over_quantized_pages():
    options = {"kv_heads": 1, "width": 64, "page_size": 128, "kv_dtype": "int8"}
    check(make_case([126, 0], 6, tree_mask=TREES[::2], **options), keys=128)


def test_scales_need_pages_of_whole_tiles_of_lanes():
    case = make_case([3], 2, width=64, page_size=32, kv_dtype="int8")
    with pytest.raises(ValueError, match="quantized pages of 32 rows, expected multiples of 128"):
        paged_attention(**case.arguments, scale=SCALE, implementation="pallas")


def test_what_vmem_cannot_hold_is_refused_with_its_sizes():
    case = make_case([3], 2, width=128, page_size=8)
    case.arguments |= {
        name: jnp.zeros((2, 2, 1 << 16, 128), BF16) for name in ("key_pages", "value_pages")
    }
    message = r"^paged_attention: needs .* of VMEM, more than 56: .*pages 6×1×65536×128"
    with pytest.raises(ValueError, match=message):
        paged_attention(**case.arguments, scale=SCALE, implementation="interpret")


@pytest.mark.parametrize(
    ("width", "page", "message"),
    [(8, 8, "head_dim 8 is not one of"), (64, 4, "pages of 4 rows, expected a multiple of 8")],
)
def test_what_the_kernel_does_not_cover(width, page, message):
    case = make_case([3], 2, width=width, page_size=page)
    with pytest.raises(ValueError, match=message):
        paged_attention(**case.arguments, scale=SCALE, implementation="pallas")
