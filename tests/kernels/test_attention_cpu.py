import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.token_trees import random_ancestry

from dflash.kernels import attention_cpu
from dflash.kernels.block_attention import block_attention, branch_attention
from dflash.kernels.paged_attention import paged_attention
from dflash.runs import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels.find_compiler() is None, reason="needs a C++ compiler")


def arrays(rng, *shapes, dtype=jnp.float32):
    return [jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "width", "page", "start", "window", "sinks", "tree"),
    [
        (1, 1, (9, 3), 64, 16, [200], None, False, False),
        (3, 6, (9, 3), 64, 16, [0, 217, 31], None, True, False),
        (3, 17, (8, 2), 32, 16, [5, 64, 100], 9, False, True),
        (2, 5, (4, 4), 80, 10, [33, 77], 40, True, True),
        (1, 64, (4, 1), 128, 128, [300], None, False, True),
        (4, 8, (8, 1), 256, 32, [700, 3, 0, 512], None, False, False),  # on all threads
    ],
)
def test_pages(batch, rows, heads, width, page, start, window, sinks, tree, dtype):
    rng = np.random.default_rng(rows)
    (queries, kv), pages = heads, 800 // page
    case = arrays(rng, (batch, rows, queries, width), *[(batch, rows, kv, width)] * 2)
    stored = arrays(rng, *[(kv, batch * pages, page, width)] * 2, dtype=dtype)
    table = jnp.asarray(rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32))
    mask = random_ancestry(rng, batch, rows) if tree else None
    sink = arrays(rng, (queries,))[0] if sinks else None
    case += [*stored, table, jnp.asarray(start, jnp.int32), mask, sink]
    form = functools.partial(paged_attention, scale=width**-0.5, window=window)
    compiled = jax.jit(form, static_argnames="implementation")
    assert "dflash_attention" in compiled.lower(*case, implementation="cpu").as_text()
    expected = compiled(*case, implementation="reference")
    found = compiled(*case, implementation="cpu")
    atol = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=atol)
    for pool, other in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(pool, other)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 11])
def test_blocks(causal, window):
    rng = np.random.default_rng(0)
    case = arrays(rng, (3, 6, 8, 64), *[(3, 6, 2, 64)] * 2, *[(3, 2, 300, 64)] * 2)
    case += [jnp.asarray([0, 299, 17], jnp.int32), arrays(rng, (8,))[0], jnp.array([6, 99, 9])]
    form = functools.partial(block_attention, scale=0.1, window=window, causal=causal)
    found, expected = (form(*case, implementation=name) for name in ("cpu", "reference"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_branches():
    rng = np.random.default_rng(0)
    visible = jnp.asarray(rng.random((2, 4, 9)) < 0.4).at[:, :, 2].set(True)
    case = arrays(rng, (2, 4, 8, 64), *[(2, 9, 2, 64)] * 2)
    stored = arrays(rng, *[(2, 2, 300, 64)] * 2)
    case = [*case, visible, *stored, jnp.asarray([20, 256], jnp.int32)]
    form = functools.partial(branch_attention, scale=0.1)
    found, expected = (form(*case, implementation=name) for name in ("cpu", "reference"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("start", [0, 15, 16, 100, 430])
def test_a_row_does_not_depend_on_others(start, window):
    """Rows of chains and trees have the bits of rows that are decoded one by one."""
    rng = np.random.default_rng(start)
    rows, page, pages = 13, 16, 30
    queries, keys, values = arrays(rng, (1, rows, 6, 32), *[(1, rows, 2, 32)] * 2)
    pools = arrays(rng, *[(2, pages, page, 32)] * 2)
    table = jnp.asarray(rng.permutation(pages)[None].astype(np.int32))
    attend = jax.jit(
        functools.partial(paged_attention, scale=0.2, window=window, implementation="cpu")
    )

    def at(position):
        return table, jnp.asarray([position], jnp.int32)

    mask = random_ancestry(rng, 1, rows)
    tree, _, _ = attend(queries, keys, values, *pools, *at(start), mask)
    chain, _, _ = attend(queries, keys, values, *pools, *at(start))
    for row in range(rows):
        for visible, found in ((np.asarray(mask[0, row]), tree), (np.arange(rows) <= row, chain)):
            stored = pools
            for position, other in enumerate(np.flatnonzero(visible), start=start):
                one = slice(other, other + 1)
                parts = (queries[:, one], keys[:, one], values[:, one])
                alone, *stored = attend(*parts, *stored, *at(position))
            np.testing.assert_array_equal(alone[:, 0], found[:, row])


def test_other_cases_are_left_to_the_reference():
    queries, keys = jnp.ones((1, 4, 2, 64)), jnp.ones((2, 3, 16, 64))
    assert attention_cpu.unsupported(queries, keys) is None
    assert "width" in attention_cpu.unsupported(queries[..., :40], keys)
    assert "rows" in attention_cpu.unsupported(jnp.ones((1, 65, 2, 64)), keys)
    assert "stored" in attention_cpu.unsupported(queries, keys.astype(jnp.int8))
