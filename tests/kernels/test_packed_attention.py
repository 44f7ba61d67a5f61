"""Tests of paged attention over packed rows against dense attention over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense import assert_close
from support.interpreter import interpret
from support.paged_cases import SCALE, make_case
from support.token_trees import TREES, ancestry

from dflash.kernels import flash_tpu
from dflash.kernels.packing import Packing
from dflash.kernels.paged_attention import packed_attention
from dflash.kernels.tuning import BlockSizes

BF16 = jnp.bfloat16
ROWS = "queries", "keys", "values"


def attend(case, counts, total, *, how, window=None):
    """Runs the packed rows of a case; returns the outputs of padded rows, and the pools."""
    length = case.arguments["queries"].shape[1]

    @jax.jit  # Every operation by itself would compile a program.
    def pack(counts, rows):
        packing = Packing.of(counts, length, total, 1)
        return packing, jax.tree.map(packing.pack, rows)

    packing, packed = pack(np.array(counts), {name: case.arguments[name] for name in ROWS})
    call = functools.partial(
        packed_attention,
        implementation=how,
        sizes=BlockSizes(16, 128),
        scale=SCALE,
        window=window,
    )
    run = interpret if how == "interpret" else lambda function, *of: jax.jit(function)(*of)
    arguments = case.arguments | packed | {"packing": packing}
    outputs, *pages = run(lambda arguments: call(**arguments), arguments)
    assert outputs.shape == packed["queries"].shape
    return np.asarray(jax.jit(Packing.unpack)(packing, outputs)), pages


def check(case, counts, total, *, how="interpret", window=None):
    """Compares each sequence's first rows."""
    if how == "interpret":
        case.poison(flash_tpu.row_tile(case.arguments["key_pages"].dtype))
    outputs, pages = attend(case, counts, total, how=how, window=window)
    tolerance = 2e-2 if case.arguments["queries"].dtype == BF16 else 2e-5
    case.check((outputs, *pages), tolerance, stale_unit=case.page_size, counts=counts)


@pytest.mark.parametrize("how", ["interpret", "reference"])
def test_rows_of_many_sequences(how):
    # A page ends within the rows of a sequence, others have a single row or none, and no packed
    # row is left for the last one.
    case = make_case(
        [30, 0, 15, 40, 3], 16, kv_heads=2, group=2, width=128, page_size=16, dtype=BF16
    )
    check(case, [11, 1, 0, 8, 0], 20, how=how)


@pytest.mark.parametrize("how", ["interpret", "reference"])
@pytest.mark.parametrize("window", [None, 3])
def test_windows_sinks_and_packed_rows_to_spare(how, window):
    case = make_case(
        [7, 0, 22], 5, kv_heads=1, group=4, width=128, page_size=8, window=window, sinks=True
    )
    check(case, [5, 1, 3], 12, how=how, window=window)


@pytest.mark.parametrize("how", ["interpret", "reference"])
def test_trees_of_packed_rows(how):
    trees = np.stack([*TREES, ancestry([0, 0, 1, 2, 2])])
    case = make_case([7, 0, 22, 9], 6, kv_heads=1, width=128, page_size=8, tree_mask=trees)
    check(case, [6, 0, 2, 4], 12, how=how)


@pytest.mark.parametrize("how", ["interpret", "reference"])
def test_a_nan_stays_in_its_sequence(how):
    case = make_case([7, 9, 3], 5, kv_heads=1, group=1, width=128, page_size=8)
    arguments = dict(case.arguments)
    case.arguments |= {name: arguments[name].at[1].set(jnp.nan) for name in ROWS}
    counts = [3, 2, 5]
    outputs, _ = attend(case, counts, 10, how=how)
    for b in (0, 2):
        assert_close(outputs[b, : counts[b]], case.expected[b, : counts[b]], 2e-5)
    assert np.isnan(outputs[1, :2]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 64}, "head_dim 64, expected 128"),
        ({"width": 128, "page_size": 128, "kv_dtype": "int8"}, "quantized pages"),
        ({"width": 128, "length": 300}, "up to 300 of a sequence, expected at most 128"),
    ],
)
def test_what_the_kernel_does_not_cover(options, message):
    case = make_case([3], **{"length": 2, "page_size": 8} | options)
    with pytest.raises(ValueError, match=message):
        check(case, [2], 4, how="pallas")
    case.arguments = make_case([3], **{"length": 2, "page_size": 8} | options).arguments
    check(case, [2], 4, how="auto")
