"""Tests of the seam between the decode loop and drafters."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash.drafters.base import Drafter
from dflash.drafters.none import NoDrafter


class Unfinished(Drafter):
    """Defines nothing."""


@pytest.mark.parametrize(("method", "arguments"), [("init_state", 2), ("draft", 5), ("observe", 6)])
def test_what_a_strategy_must_define(method, arguments):
    with pytest.raises(TypeError, match=f"Unfinished must define {method}"):
        getattr(Unfinished(), method)(*[None] * arguments)


def test_insert_puts_a_prefix_at_the_head_of_its_slot():
    state = {"rows": jnp.zeros((3, 2, 5)), "counts": jnp.zeros(3, jnp.int32)}
    prefix = {"rows": jnp.ones((1, 2, 4)), "counts": jnp.array([7], jnp.int32)}
    after = Unfinished().insert(state, prefix, jnp.int32(1))
    expected = np.zeros((3, 2, 5))
    expected[1, :, :4] = 1
    np.testing.assert_array_equal(after["rows"], expected)
    np.testing.assert_array_equal(after["counts"], [0, 7, 0])


def test_none_proposes_nothing():
    drafter = NoDrafter()
    assert (drafter.block_size, drafter.feature_layers) == (1, ())
    state = drafter.init_state(3, 10)
    proposal, state = drafter.draft(state, jnp.array([4, 5, 6]), None, None, None)
    assert (proposal.tokens.shape, proposal.tokens.dtype) == ((3, 0), jnp.int32)
    assert drafter.observe(state, *[None] * 5) == ()
