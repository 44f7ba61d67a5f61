"""One step: which key each piece of a batch draws with, and what the metrics are of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import make_sharding

from dflash.training import state as states
from dflash.training import step as steps_lib

ROWS = 4


def take_steps(count: int, pieces: int, seed: int = 0) -> list[dict]:
    """Metrics of some steps of a loss that draws a number and otherwise sums two weights."""
    sharding = make_sharding()
    optimizer = optax.sgd(0.5)
    params = {"w": jax.device_put(jnp.ones(2), sharding.replicated())}
    state = states.create(params, optimizer, seed, sharding)

    def loss(params, frozen, batch, key):
        draw = jax.random.uniform(key)
        return (params["w"] ** 2).sum(), {"draw": draw, "rows": batch["x"].sum()}

    step = steps_lib.make_train_step(
        loss,
        optimizer,
        lambda step: 10.0 * step,
        dtype=jnp.dtype("float32"),
        accumulate_steps=pieces,
        sharding=sharding,
        state=state,
    )
    found = []
    for _ in range(count):
        state, metrics = step(state, (), {"x": jnp.ones(ROWS)})
        found.append(jax.device_get(metrics))
    return found


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_every_piece_of_every_step_draws_its_own_number(pieces):
    found = [float(metrics["draw"]) for metrics in take_steps(3, pieces)]
    for step, draw in enumerate(found):
        key = jax.random.fold_in(states.step_key_base(0), step)
        keys = [jax.random.fold_in(key, index) for index in range(pieces)]
        draws = [jax.random.uniform(key) for key in (keys if pieces > 1 else [key])]
        assert len({float(draw) for draw in draws}) == pieces
        assert draw == pytest.approx(np.mean(draws))
    assert len(set(found)) == 3
    assert found[0] != float(take_steps(1, pieces, seed=1)[0]["draw"])


def test_metrics_are_of_the_state_before_the_step():
    first, second = take_steps(2, pieces=1)
    assert (first["loss"], second["loss"]) == (2.0, 0.0)
    assert first["grad_norm"] == pytest.approx(np.sqrt(8))
    assert (first["learning_rate"], second["learning_rate"]) == (0, 10)
    assert first["rows"] == ROWS
