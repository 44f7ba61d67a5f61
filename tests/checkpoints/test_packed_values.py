"""Tests of packed values against formulas for one value at a time."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.checkpoints import safetensors_header

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPERTS, ROWS, GROUPS = 3, 5, 4


def value_of(blocks, scales, expert, row, column):
    """The number in a column of 32 · G, as the format defines it."""
    byte = int(blocks[expert, row, column // 32, column % 32 // 2])
    code = byte >> 4 if column % 2 else byte & 0xF
    sign = -1.0 if code & 8 else 1.0
    return sign * E2M1[code & 7] * 2.0 ** (int(scales[expert, row, column // 32]) - 127)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Random blocks and scales, and their tensors in a file."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (EXPERTS, ROWS, GROUPS, 16), dtype=np.uint8)
    scales = rng.integers(2, 253, (EXPERTS, ROWS, GROUPS), dtype=np.uint8)
    file = tmp_path_factory.mktemp("packed") / "model.safetensors"
    header, begin = {}, 0
    for name, array in (("up_proj_blocks", blocks), ("up_proj_scales", scales)):
        end = begin + array.nbytes
        header[name] = {"dtype": "U8", "shape": array.shape, "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        stream.write(blocks.tobytes() + scales.tobytes())
    return blocks, scales, safetensors_header.read_headers(file.parent)


def bounds(size):
    pairs = st.tuples(st.integers(0, size - 1), st.integers(1, size))
    return pairs.filter(lambda pair: pair[0] < pair[1])


@settings(max_examples=50)
@given(experts=bounds(EXPERTS), rows=bounds(ROWS), columns=bounds(32 * GROUPS))
def test_any_part_of_mxfp4_is_read_exactly(stored, experts, rows, columns):
    blocks, scales, tensors = stored
    groups = columns[0] // 32, -(-columns[1] // 32)
    lead = slice(*experts), slice(*rows)
    values = tensors["up_proj_blocks"].read((*lead, slice(*columns)))
    factors = tensors["up_proj_scales"].read((*lead, slice(*groups)))
    assert (values.dtype, factors.dtype) == (np.int8, np.float32)
    spread = np.repeat(factors, 32, axis=-1)[..., columns[0] - 32 * groups[0] :]
    numbers = values.astype(np.float64) * spread[..., : values.shape[-1]]
    expected = [
        [[value_of(blocks, scales, e, r, c) for c in range(*columns)] for r in range(*rows)]
        for e in range(*experts)
    ]
    np.testing.assert_array_equal(numbers, expected)
    np.testing.assert_array_equal(numbers.astype(ml_dtypes.bfloat16), expected)


def test_a_tensor_is_packed_if_name_and_dtype_say_so(stored):
    _, _, tensors = stored
    blocks = tensors["up_proj_blocks"].packing
    assert blocks.stored_shape((EXPERTS, ROWS, 32 * GROUPS)) == (EXPERTS, ROWS, GROUPS, 16)
    assert tensors["up_proj_scales"].packing.stored_shape((2, 3)) == (2, 3)
