"""Tests that the latent attention and expert kernels compile for TPUs, at published shapes."""

import functools

import jax.numpy as jnp
import pytest
from support.tpu_compiler import CHIPS, compile_for

from dflash.kernels.grouped_matmul import grouped_matmul
from dflash.kernels.latent_attention import latent_attention
from dflash.kernels.quantized import Quantized

pytestmark = pytest.mark.tpu_compiler

BF16, F32, INT8, FP8 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn
V5P = CHIPS[1]
LATENT, KEPT = 512, 576  # Shapes of DeepSeek-V3 and Kimi K2.


@pytest.mark.parametrize(
    ("chip", "length", "heads", "kv_dtype", "tree"),
    [
        *((chip, 16, heads, BF16, False) for chip in CHIPS for heads in (64, 8)),
        (V5P, 1, 64, INT8, False),
        (V5P, 16, 64, FP8, False),
        (V5P, 8, 128, INT8, False),
        (V5P, 33, 8, FP8, True),
        (V5P, 128, 64, BF16, True),
    ],
)
def test_latent_attention(chip, length, heads, kv_dtype, tree):
    batch, pages, page = 2, 8, 128
    pool = (1, batch * pages + 1, page, KEPT)
    shapes = [
        ((batch, length, heads, KEPT), BF16),
        ((batch, length, KEPT), BF16),
        (pool, kv_dtype),
        ((batch, pages), jnp.int32),
        ((batch,), jnp.int32),
        *([((batch, length, length), jnp.bool_)] if tree else []),
        *([] if kv_dtype == BF16 else [((*pool[:2], 1, page), F32)]),
    ]

    def call(*arrays):
        arrays = list(arrays)
        if kv_dtype != BF16:
            arrays[2] = Quantized(arrays[2], arrays.pop())
        return latent_attention(*arrays, value_width=LATENT, scale=0.1)

    compile_for(chip, call, shapes)


@pytest.mark.parametrize(
    ("chip", "count", "shape", "dtype", "block"),
    [
        *[(chip, 128, (32, 2048, 768), BF16, None) for chip in CHIPS],
        *[(chip, 64, (24, 7168, 1024), INT8, (32, 1)) for chip in CHIPS],
        (V5P, 64, (24, 1024, 7168), INT8, (32, 1)),
        (V5P, 128, (32, 768, 2048), INT8, None),
        (V5P, 128, (8, 7168, 2048), FP8, (128, 128)),
        (V5P, 4096, (32, 2048, 768), BF16, None),
        (V5P, 32, (32, 2880, 5760), INT8, (32, 1)),  # gpt-oss
        (V5P, 4096, (32, 2880, 2880), BF16, None),
    ],
)
def test_grouped_products(chip, count, shape, dtype, block):
    groups, depth, width = shape
    scales = (groups, 1, width)
    if block is not None:
        scales = (groups, depth // block[0], width // block[1])
    shapes = [((count, depth), BF16), (shape, dtype), ((groups,), jnp.int32)]
    call = functools.partial(grouped_matmul, block=block)
    compile_for(chip, call, shapes if dtype == BF16 else [*shapes, (scales, F32)])
