import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import argmax


def test_it_is_that_of_numpy():
    rng = np.random.default_rng(0)
    rows = rng.integers(-3, 4, size=(2, 40, 50)).astype(np.float32)  # many are equal
    rows[0, 1] = -np.inf
    rows[0, 2, 7:9] = np.inf
    rows[1, 3, [5, 9]] = np.nan
    rows[1, 4, 0], rows[1, 4, 3] = np.inf, np.nan
    found = jax.jit(argmax.argmax)(jnp.asarray(rows))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, rows.argmax(axis=-1))
