"""Tests of the seam between the decode loop and drafters."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash.drafters.base import Drafter


class Unfinished(Drafter):
    """Defines nothing."""


@pytest.mark.parametrize(("method", "arguments"), [("init_state", 2), ("draft", 5), ("observe", 6)])
def test_what_a_strategy_must_define(method, arguments):
    with pytest.raises(TypeError, match=f"Unfinished must define {method}"):
        getattr(Unfinished(), method)(*[None] * arguments)


def test_insert_puts_a_sequence_at_the_head_of_its_slot():
    state = {"rows": jnp.zeros((3, 2, 5)), "counts": jnp.zeros(3, jnp.int32)}
    rows = jnp.stack([jnp.full((2, 4), 9.0), jnp.ones((2, 4))])
    other = {"rows": rows, "counts": jnp.array([5, 7], jnp.int32)}
    after = Unfinished().insert(state, other, jnp.int32(1), jnp.int32(1))
    expected = np.zeros((3, 2, 5))
    expected[1, :, :4] = 1
    np.testing.assert_array_equal(after["rows"], expected)
    np.testing.assert_array_equal(after["counts"], [0, 7, 0])


def test_clear_empties_the_sequences_that_are_fresh():
    state = {"rows": jnp.ones((3, 2, 5)), "counts": jnp.arange(3)}
    after = Unfinished().clear(state, jnp.array([False, True, False]))
    assert after["rows"].sum(axis=(1, 2)).tolist() == [10, 0, 10]
    assert after["counts"].tolist() == [0, 0, 2]
