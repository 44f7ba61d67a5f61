"""Tests of gated DeltaNet's kernels in interpret mode, against plain JAX.

There are few cases, as each compiles the kernels anew; the rule itself is tested in
test_gated_delta.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.interpreter import interpret
from support.token_trees import random_ancestry

from dflash.kernels.delta_block import Heads, commit_block, verify_block

BATCH, WIDTH, TAPS, EPS = 2, 128, 4, 1e-6
# Rows, key heads, value heads, dtype of the rows, and whether they form a tree.
CASES = [
    (16, 2, 4, jnp.float32, False),
    (1, 1, 3, jnp.bfloat16, False),
    (17, 2, 2, jnp.float32, True),
    (9, 8, 8, jnp.bfloat16, True),
]


def make_case(length, key_heads, value_heads, dtype, is_tree):
    """Returns the arguments of `verify_block`, with decays from none to almost everything."""
    rng = np.random.default_rng(length)
    channels = (2 * key_heads + value_heads) * WIDTH
    shape = (BATCH, length, value_heads)
    heads = Heads(
        rng.normal(size=(BATCH, length, channels + value_heads * WIDTH)),
        -np.exp(rng.uniform(-9, 7, shape)),
        rng.uniform(0, 1, shape),
        rng.normal(size=(channels, TAPS)),
        rng.normal(size=WIDTH),
    )
    dtypes = Heads(dtype, jnp.float32, jnp.float32, dtype, dtype)
    heads = jax.tree.map(jnp.asarray, heads, dtypes)
    memory = jnp.asarray(rng.normal(size=(BATCH, value_heads, WIDTH, WIDTH)).astype(jnp.float32))
    before = jnp.asarray(rng.normal(size=(BATCH, TAPS - 1, channels)).astype(dtype))
    return heads, memory, before, random_ancestry(rng, BATCH, length) if is_tree else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_blocks_are_verified_and_committed_as_in_plain_jax(case):
    heads, memory, before, ancestry = make_case(*case)
    length, dtype = case[0], heads.rows.dtype

    def verify(implementation):
        return lambda *arrays: verify_block(*arrays, eps=EPS, implementation=implementation)

    arguments = heads, memory, before, ancestry
    outputs, block = jax.jit(verify("reference"))(*arguments)
    ours, own_block = interpret(verify("interpret"), *arguments)
    assert ours.dtype == outputs.dtype == dtype
    tolerance = {"atol": 3e-2, "rtol": 2e-2} if dtype == jnp.bfloat16 else {"atol": 1e-4}
    np.testing.assert_allclose(ours.astype(float), outputs.astype(float), **tolerance)
    for found, wanted in zip(own_block, block, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)

    def commit(implementation):
        return lambda *arrays: commit_block(*arrays, implementation=implementation)

    # One sequence accepts some of its rows, the other one none.
    chain = np.arange(length) if ancestry is None else np.flatnonzero(ancestry[0, -1])
    count = np.array([max(len(chain) - 1, 1), 0], np.int32)
    paths = np.zeros((BATCH, length), np.int32)
    paths[0, : len(chain)] = chain
    path = None if ancestry is None else paths
    # Rows that were not accepted leave no trace, whatever they hold.
    rejected = ~np.isin(np.arange(length), chain[: count[0]])
    rows = heads.rows.at[0, rejected].set(np.nan)
    arguments = memory, before, block, rows, count, path
    wanted = jax.jit(commit("reference"))(*arguments)
    found = interpret(commit("interpret"), *arguments)
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
    np.testing.assert_array_equal(found[0][1], memory[1])
    np.testing.assert_array_equal(found[1].astype(float), wanted[1].astype(float))


def test_unfit_calls_are_errors():
    heads, memory, before, _ = make_case(*CASES[0])
    with pytest.raises(ValueError, match="do not fit 1024 channels"):
        verify_block(heads._replace(rows=heads.rows[..., 1:]), memory, before, eps=EPS)
    long = jax.tree.map(lambda x: jnp.tile(x, (1, 5, 1)), heads[:3])
    with pytest.raises(ValueError, match="80 rows, expected at most 64"):
        verify_block(Heads(*long, *heads[3:]), memory, before, eps=EPS, implementation="pallas")
