"""One step of training as one jitted program: loss, gradients, update."""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash.layers.linear import matmul_precision
from dflash.parallel import compiler_options
from dflash.parallel.sharding import Sharding
from dflash.training import state as states
from dflash.training.state import Params, TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# (parameters in the compute dtype, frozen parameters, batch, key) -> loss, metrics. If metrics have
# "weight", the loss is a mean over that many tokens, and pieces of a batch are averaged by it.
LossFunction = Callable[[Params, Params, Batch, jax.Array], tuple[jax.Array, Metrics]]

WEIGHT = "weight"


def make_train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array],
    *,
    dtype: jnp.dtype,
    accumulate_steps: int,
    sharding: Sharding,
    state: TrainState,
):
    """Makes a jitted function: (state, frozen, batch) -> state, metrics. It donates the state.

    Args:
      loss: loss of one piece of a batch.
      optimizer: update rule.
      schedule: step -> learning rate, for the metrics.
      dtype: compute dtype; gradients and weights stay float32.
      accumulate_steps: number of pieces of a batch, computed one after the other.
      sharding: the run's mesh and rules.
      state: abstract state, for its shardings.
    """

    def step(state: TrainState, frozen: Params, batch: Batch):
        with jax.default_matmul_precision(matmul_precision(dtype)):
            key = states.step_key(state)
            grads, metrics = _gradients(
                loss, state.params, frozen, batch, key, dtype, accumulate_steps, sharding
            )
            updates, moments = optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics["grad_norm"] = optax.tree.norm(grads)
            metrics["learning_rate"] = schedule(state.step)
            return TrainState(state.step + 1, state.key, params, moments), metrics

    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(states.shardings(state), sharding.replicated()),
        compiler_options=compiler_options.training_options(sharding) or None,
    )


def make_evaluation_step(loss: LossFunction, *, dtype: jnp.dtype, sharding: Sharding):
    """Makes a jitted function: (params, frozen, batch, key) -> metrics, including the loss."""

    def step(params: Params, frozen: Params, batch: Batch, key: jax.Array) -> Metrics:
        with jax.default_matmul_precision(matmul_precision(dtype)):
            value, metrics = loss(optax.tree.cast(params, dtype), frozen, batch, key)
            return _complete(value, metrics)

    return jax.jit(step, out_shardings=sharding.replicated())


def make_feature_step(features: Callable[[Params, Batch], Batch], *, dtype: jnp.dtype):
    """Makes a jitted function: (frozen, batch) -> features, as a train step has them."""

    def step(frozen: Params, batch: Batch) -> Batch:
        with jax.default_matmul_precision(matmul_precision(dtype)):
            return features(frozen, batch)

    return jax.jit(step)


def place(batch: dict[str, np.ndarray], sharding: Sharding, rows: int) -> Batch:
    """Makes global arrays from this process's rows of a batch.

    Args:
      batch: arrays [rows of this process, …], in the order of `rows_of_process`.
      sharding: the run's mesh and rules.
      rows: rows of the batch, of all processes together.
    """
    mine = rows_of_process(sharding, rows)

    def put(array):
        def piece(index):
            begin, end, _ = index[0].indices(rows)
            first = bisect.bisect_left(mine, begin)
            return array[first : first + end - begin]

        names = ("batch", *(None,) * (array.ndim - 1))
        shape = (rows, *array.shape[1:])
        return jax.make_array_from_callback(shape, sharding.named(shape, names), piece)

    return {name: put(array) for name, array in batch.items()}


def rows_of_process(sharding: Sharding, rows: int) -> tuple[int, ...]:
    """Numbers of the rows of every batch that this process's devices hold, ascending."""
    return rows_by_process(sharding, rows)[jax.process_index()]


@functools.lru_cache(maxsize=8)
def rows_by_process(sharding: Sharding, rows: int) -> dict[int, tuple[int, ...]]:
    """Numbers of the rows of a batch that each process's devices hold, ascending, by process.

    A device mesh need not be in the order of processes, so the rows of one may lie anywhere, and
    several processes may hold the same ones.
    """
    found: dict[int, set[int]] = {}
    layout = sharding.named((rows,), ("batch",))
    for device, index in layout.devices_indices_map((rows,)).items():
        found.setdefault(device.process_index, set()).update(range(*index[0].indices(rows)))
    return {process: tuple(sorted(found[process])) for process in sorted(found)}


def _gradients(loss, params, frozen, batch, key, dtype, pieces, sharding) -> tuple[Any, Metrics]:
    """Gradients and metrics, averaged over the pieces of a batch."""

    @functools.partial(jax.grad, has_aux=True)
    def differentiate(params, batch, key):
        value, metrics = loss(optax.tree.cast(params, dtype), frozen, batch, key)
        return value, _complete(value, metrics)

    if pieces == 1:
        return differentiate(params, batch, key)

    def body(carry, piece):
        grads, metrics, seen = carry
        index, part = piece
        new_grads, new_metrics = differentiate(params, part, jax.random.fold_in(key, index))
        weight = new_metrics[WEIGHT]
        grads = optax.tree.add_scale(grads, weight, new_grads)
        metrics = optax.tree.add_scale(metrics, weight, new_metrics)
        return (grads, metrics, seen + weight), ()

    parts = {name: _cut(array, pieces, sharding) for name, array in batch.items()}
    first = {name: array[0] for name, array in parts.items()}
    shapes = jax.eval_shape(differentiate, params, first, key)
    start = (*optax.tree.zeros_like(shapes, jnp.float32), jnp.float32(0))
    (grads, metrics, seen), _ = jax.lax.scan(body, start, (jnp.arange(pieces), parts))
    scale = 1 / jnp.maximum(seen, jnp.finfo(jnp.float32).tiny)
    grads, metrics = jax.tree.map(lambda x: x * scale, (grads, metrics))
    return grads, metrics | {WEIGHT: seen}


def _cut(array: jax.Array, pieces: int, sharding: Sharding) -> jax.Array:
    """[B, …] -> [pieces, B / pieces, …]; every row stays on its device."""
    rows = array.shape[0] // pieces
    array = array.reshape(rows, pieces, *array.shape[1:]).swapaxes(0, 1)
    return sharding.constrain(array, None, "batch", *(None,) * (array.ndim - 2))


def _complete(value: jax.Array, metrics: Metrics) -> Metrics:
    """The metrics with the loss, and with a weight of 1 if they have none."""
    return {WEIGHT: jnp.float32(1), **metrics, "loss": value}
