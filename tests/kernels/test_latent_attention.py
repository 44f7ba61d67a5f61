"""Tests of latent attention, reference and kernel in interpret mode, against dense attention.

Slots that a sequence does not use hold NaN. There are few cases, as each compiles the kernel anew.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense import dense_attention
from support.interpreter import interpret
from support.paged_cases import SCALE, make_case, row_parts
from support.token_trees import TREES, ancestry

from dflash.kernels import flash_tpu
from dflash.kernels.latent_attention import expanded_attention, latent_attention
from dflash.kernels.tuning import LATENT_ATTENTION, LatentSizes

BF16, F32 = jnp.bfloat16, jnp.float32
NAMES = {"keys": "latents", "key_pages": "pages"}


def latent_case(starts, length, *, heads, width, **options):
    """Returns sequences whose rows are both keys and values."""
    case = make_case(starts, length, kv_heads=1, group=heads, width=width, **options)
    unit = flash_tpu.row_tile(case.arguments["key_pages"].dtype)
    case.poison(unit)
    return case


def arguments_of(case):
    taken = {NAMES.get(name, name): array for name, array in case.arguments.items()}
    taken["latents"] = taken["latents"][:, :, 0]
    return {name: array for name, array in taken.items() if not name.startswith("value")}


@functools.partial(jax.jit, static_argnames="value_width")
def reference(arguments, value_width):
    options = {"scale": SCALE, "implementation": "reference"}
    return latent_attention(**arguments, value_width=value_width, **options)


def check(case, value_width, outputs, pages):
    """Compares with dense attention over the stored rows, head by head."""
    # Not on the device, where each shape of an index compiles a program.
    arguments = {
        name: np.asarray(case.arguments[name])
        for name in ("queries", "start", "page_table", "tree_mask")
        if name in case.arguments
    }
    outputs = np.asarray(outputs)
    stored = np.prod(np.broadcast_arrays(*row_parts(pages)), axis=0)[0]
    length, tree = arguments["queries"].shape[1], arguments.get("tree_mask")
    assert outputs.dtype == arguments["queries"].dtype
    tolerance = 2e-2 if outputs.dtype == BF16 else 2e-5
    for b, start in enumerate(arguments["start"].tolist()):
        rows = stored[arguments["page_table"][b]].reshape(-1, stored.shape[-1])[: start + length]
        inside = np.tril(np.ones((length, length), bool)) if tree is None else tree[b]
        visible = np.concatenate([np.ones((length, start), bool), inside], axis=1)
        queries = np.asarray(arguments["queries"][b], np.float64)
        wanted = dense_attention(queries, rows[:, None], rows[:, None], visible, SCALE)
        found = np.asarray(outputs[b], np.float64)
        np.testing.assert_allclose(found, wanted[..., :value_width], atol=tolerance, rtol=0.02)


def check_kernel(case, sizes=LATENT_ATTENTION):
    """Compares outputs with dense attention, and pages, except stale rows, with the reference."""
    call = functools.partial(
        latent_attention, value_width=128, scale=SCALE, implementation="interpret", sizes=sizes
    )
    outputs, pages = interpret(lambda arguments: call(**arguments), arguments_of(case))
    check(case, 128, outputs, pages)
    _, stored = reference(arguments_of(case), 128)
    kept = ~case._beside(case.page_size) | case.owned
    for found, wanted in zip(row_parts(pages), row_parts(stored), strict=True):
        np.testing.assert_array_equal(found[:, kept], wanted[:, kept])


@settings(max_examples=25)
@given(st.data())
def test_the_reference_is_dense_attention(data):
    """Each shape is compiled, so there are two per kind of pages, with many different values."""
    length = data.draw(st.sampled_from([1, 4]))
    starts = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2))
    trees = None
    if length > 1:
        parents = [[data.draw(st.integers(0, i)) for i in range(length - 1)] for _ in starts]
        trees = np.stack([ancestry(one) for one in parents])
    kv_dtype = data.draw(st.sampled_from([None, "int8", "float8_e4m3fn"]))
    case = make_case(
        starts, length, kv_heads=1, group=3, width=12, tree_mask=trees, kv_dtype=kv_dtype,
        table_pages=4, seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    check(case, 8, *reference(arguments_of(case), 8))


@pytest.mark.parametrize(
    ("length", "starts", "page", "dtype", "heads", "sizes"),
    [
        (1, [0, 15, 16, 33], 16, BF16, 4, (32, 8, 4)),
        (16, [40, 0, 32], 16, BF16, 8, (32, 64, 32)),
        (5, [17, 1, 0], 8, F32, 6, (16, 10, 5)),
        (17, [63, 16], 16, F32, 1, (32, 512, 128)),
    ],
)
def test_ragged_starts_groups_and_chunks_of_heads(length, starts, page, dtype, heads, sizes):
    case = latent_case(starts, length, heads=heads, width=192, page_size=page, dtype=dtype)
    check_kernel(case, LatentSizes(*sizes))


def test_trees_over_quantized_pages():
    options = {"heads": 2, "width": 192, "page_size": 128, "kv_dtype": "int8"}
    check_kernel(latent_case([126, 0], 6, tree_mask=TREES[::2], **options))


@pytest.mark.parametrize(
    ("value_width", "page", "kv_dtype", "message"),
    [
        (64, 16, None, "value_width 64, expected a multiple of 128"),
        (128, 4, None, "pages of 4 rows, expected a multiple of 8"),
        (128, 32, "int8", "quantized pages of 32 rows, expected multiples of 128"),
    ],
)
def test_what_the_kernel_does_not_cover(value_width, page, kv_dtype, message):
    case = latent_case([3], 2, heads=2, width=192, page_size=page, kv_dtype=kv_dtype)
    with pytest.raises(ValueError, match=message):
        latent_attention(
            **arguments_of(case), value_width=value_width, scale=SCALE, implementation="pallas"
        )


def test_shapes_that_do_not_fit():
    arguments = arguments_of(latent_case([3], 2, heads=2, width=192, page_size=8))
    narrow = arguments | {"latents": arguments["latents"][..., :5]}
    with pytest.raises(ValueError, match=r"latents is \(1, 2, 5\), expected \(1, 2, 192\)"):
        latent_attention(**narrow, value_width=128, scale=SCALE)
    with pytest.raises(ValueError, match=r"start is \(2,\), expected \(1,\)"):
        expanded_attention(**arguments | {"start": jnp.zeros(2)}, expand=None, scale=SCALE)
    few = arguments["queries"][..., :9]
    with pytest.raises(ValueError, match=r"queries \(1, 2, 2, 9\) do not fit pages"):
        latent_attention(**arguments | {"queries": few}, value_width=128, scale=SCALE)
