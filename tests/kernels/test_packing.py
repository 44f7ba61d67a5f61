"""Tests of packed rows: what is packed comes back, and attention sees padded rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.kernels.packing import Packing

LENGTH = 4
# Rows of each sequence and rows that a replica has room for: full, with room to spare, and empty.
CASES = [([1, 3, 2], 6), ([4, 0, 1], 9), ([0, 0, 0], 3), ([4, 4, 4], 12)]


def padded(batch: int) -> jnp.ndarray:
    return jnp.arange(batch * LENGTH * 2, dtype=jnp.float32).reshape(batch, LENGTH, 2)


@functools.partial(jax.jit, static_argnums=(1, 2))
def pack_and_unpack(counts, total, replicas):
    packing = Packing.of(counts, LENGTH, total, replicas)
    packed = packing.pack(padded(len(counts)))
    return packing.place, packed, packing.unpack(packed), packing.spread(jnp.arange(len(counts)))


@pytest.mark.parametrize(("counts", "total"), CASES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_packed_comes_back(counts, total, replicas):
    counts = counts * replicas
    rows = np.asarray(padded(len(counts)))
    places, packed, back, owners = map(
        np.asarray, pack_and_unpack(np.array(counts), total, replicas)
    )
    assert packed.shape == (replicas, total, 2)
    for b, count in enumerate(counts):
        np.testing.assert_array_equal(back[b, :count], rows[b, :count])
        place = places[b, :count]
        np.testing.assert_array_equal(owners[b * replicas // len(counts), place], b)
    used = sum(counts) // replicas
    assert len({tuple(row) for row in packed[0, :used].tolist()}) == used
