"""Tests of the parts of a bandit: counts that fade, and trials that are paid for."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash.drafters.parts.bandit import Counts, Trial


def counts(tried, accepted) -> Counts:
    return Counts(jnp.array(tried, jnp.float32), jnp.array(accepted, jnp.float32))


def test_rates_go_from_the_prior_to_what_was_seen():
    rates = counts([0, 8, 1e6], [0, 0, 2e5]).rates(0.5, 8.0)
    np.testing.assert_allclose(rates, [0.5, 0.25, 0.2], rtol=1e-4)


def test_what_is_old_fades():
    after = counts([4, 4], [4, 0]).after(counts([1, 0], [0, 0]), jnp.array([0.5, 1.0]))
    np.testing.assert_array_equal(after.tried, [3, 4])
    np.testing.assert_array_equal(after.accepted, [2, 0])


def test_capped_counts_keep_their_rates():
    many, few = counts([80, 40], [20, 30]), counts([8, 4], [2, 3])
    np.testing.assert_allclose(many.capped(16).tried, [16, 8])
    np.testing.assert_allclose(many.capped(16).rates(0, 0), many.rates(0, 0))
    np.testing.assert_array_equal(few.capped(16).tried, few.tried)


def test_a_trial_comes_once_its_loss_is_earned_and_is_paid():
    zero = jnp.zeros((), jnp.int32)
    trial = Trial(zero, zero, jnp.float32(0), jnp.float32(0))
    trial = trial.between(jnp.int32(2), jnp.int32(1), jnp.float32(0.5))
    indices = []
    for _ in range(20):
        indices.append(int(trial.index))
        trial = trial.earning(0.1 if indices[-1] == 2 else -0.5)
    assert indices == ([2] * 5 + [1]) * 3 + [2] * 2


@pytest.mark.parametrize(("amount", "credit"), [(100.0, 0.5), (-100.0, -0.5)])
def test_neither_savings_nor_debt_exceed_one_trial(amount, credit):
    trial = Trial(jnp.int32(2), jnp.int32(1), jnp.float32(0.5), jnp.float32(0))
    assert float(trial.earning(amount).credit) == credit
