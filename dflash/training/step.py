"""Training step as one jitted program: loss, gradients and update."""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash.layers.products import matmul_precision
from dflash.parallel import compiler_options
from dflash.parallel.sharding import Sharding
from dflash.training import state as states
from dflash.training.state import Params, TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# Maps (parameters in the compute dtype, frozen arrays, batch, key) to (loss, metrics). A metric
# named `WEIGHT` is the number of tokens that the loss is a mean of; microbatches are averaged with
# these weights.
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
    """Returns a jitted train step, (state, frozen, batch) -> (state, metrics).

    The step donates the state.

    Args:
      schedule: Maps a step to its learning rate, for the metrics.
      dtype: Compute dtype; gradients and weights stay float32.
      accumulate_steps: Number of microbatches per batch, computed one after the other.
    """

    def step(state: TrainState, frozen: Params, batch: Batch):
        with jax.default_matmul_precision(matmul_precision(dtype)):
            key = jax.random.wrap_key_data(state.key, impl="threefry2x32")
            key = jax.random.fold_in(key, state.step)
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
    """Returns a jitted function (params, frozen, batch, key) -> metrics, which include the loss."""

    def step(params: Params, frozen: Params, batch: Batch, key: jax.Array) -> Metrics:
        with jax.default_matmul_precision(matmul_precision(dtype)):
            value, metrics = loss(optax.tree.cast(params, dtype), frozen, batch, key)
            return _complete(value, metrics)

    return jax.jit(step, out_shardings=sharding.replicated())


def make_feature_step(features: Callable[[Params, Batch], Batch], *, dtype: jnp.dtype):
    """Returns a jitted function (frozen, batch) -> features, equal to those of a train step."""

    def step(frozen: Params, batch: Batch) -> Batch:
        with jax.default_matmul_precision(matmul_precision(dtype)):
            return features(frozen, batch)

    return jax.jit(step)


def place(batch: dict[str, np.ndarray], sharding: Sharding, rows: int) -> Batch:
    """Builds global arrays from this process's rows of a batch.

    Args:
      batch: Arrays [rows of this process, …], in the order of `rows_of_process`.
    """
    own_rows = rows_of_process(sharding, rows)

    def put(array):
        def shard_rows(index):
            begin, end, _ = index[0].indices(rows)
            first = bisect.bisect_left(own_rows, begin)
            return array[first : first + end - begin]

        names = ("batch", *(None,) * (array.ndim - 1))
        shape = (rows, *array.shape[1:])
        return jax.make_array_from_callback(shape, sharding.named(shape, names), shard_rows)

    return {name: put(array) for name, array in batch.items()}


def rows_of_process(sharding: Sharding, rows: int) -> tuple[int, ...]:
    """Returns the indices of the rows of a batch on this process's devices, ascending."""
    return rows_by_process(sharding, rows)[jax.process_index()]


@functools.lru_cache(maxsize=8)
def rows_by_process(sharding: Sharding, rows: int) -> dict[int, tuple[int, ...]]:
    """Returns the indices of the rows of a batch on each process's devices, ascending.

    The devices of a mesh need not be in the order of processes, so the rows of a process need not
    be contiguous, and several processes may hold the same rows.
    """
    row_sets: dict[int, set[int]] = {}
    layout = sharding.named((rows,), ("batch",))
    for device, index in layout.devices_indices_map((rows,)).items():
        row_sets.setdefault(device.process_index, set()).update(range(*index[0].indices(rows)))
    return {process: tuple(sorted(row_sets[process])) for process in sorted(row_sets)}


def _gradients(
    loss, params, frozen, batch, key, dtype, num_microbatches, sharding
) -> tuple[Any, Metrics]:
    @functools.partial(jax.grad, has_aux=True)
    def differentiate(params, batch, key):
        value, metrics = loss(optax.tree.cast(params, dtype), frozen, batch, key)
        return value, _complete(value, metrics)

    if num_microbatches == 1:
        return differentiate(params, batch, key)

    def body(carry, numbered):
        grads, metrics, total_weight = carry
        index, microbatch = numbered
        new_grads, new_metrics = differentiate(params, microbatch, jax.random.fold_in(key, index))
        weight = new_metrics[WEIGHT]
        grads = optax.tree.add_scale(grads, weight, new_grads)
        metrics = optax.tree.add_scale(metrics, weight, new_metrics)
        return (grads, metrics, total_weight + weight), ()

    microbatches = {
        name: _split(array, num_microbatches, sharding) for name, array in batch.items()
    }
    first = {name: array[0] for name, array in microbatches.items()}
    shapes = jax.eval_shape(differentiate, params, first, key)
    start = (*optax.tree.zeros_like(shapes, jnp.float32), jnp.float32(0))
    (grads, metrics, total_weight), _ = jax.lax.scan(
        body, start, (jnp.arange(num_microbatches), microbatches)
    )
    scale = 1 / jnp.maximum(total_weight, jnp.finfo(jnp.float32).tiny)
    grads, metrics = jax.tree.map(lambda x: x * scale, (grads, metrics))
    return grads, metrics | {WEIGHT: total_weight}


def _split(array: jax.Array, num_microbatches: int, sharding: Sharding) -> jax.Array:
    """Splits [B, …] into [M, B / M, …] for M microbatches; every row stays on its device."""
    rows = array.shape[0] // num_microbatches
    array = array.reshape(rows, num_microbatches, *array.shape[1:]).swapaxes(0, 1)
    return sharding.constrain(array, None, "batch", *(None,) * (array.ndim - 2))


def _complete(value: jax.Array, metrics: Metrics) -> Metrics:
    """Returns the metrics with the loss added, and a weight of 1 if they have none."""
    return {WEIGHT: jnp.float32(1), **metrics, "loss": value}
