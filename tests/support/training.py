"""What tests of drafters and losses share: states, batches, weights and gradients by path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.layers.losses import TrainBatch
from dflash.parallel import parameters
from support.models import packed_rows, zeros

VOCAB, WIDTH = 48, 32  # Of `support.models.make_architecture`.


def random_batch(rows, length: int, *, taps: int = 2, share: float = 1.0, seed: int = 0):
    """Returns packed rows, each given as a list of document lengths and padded.

    Args:
      taps: Tapped layers of the target, whose features the batch has.
      share: Probability that a token counts.
      seed: Seed of tokens, features and of what counts.
    """
    rng = np.random.default_rng(seed)
    segments, positions = packed_rows(rows, length)
    shape = segments.shape
    arrays = (
        rng.integers(0, VOCAB - 1, shape).astype(np.int32),
        positions,
        segments,
        (rng.random(shape) < share).astype(np.float32),
        rng.normal(size=(*shape, taps * WIDTH)).astype(np.float32),
        rng.normal(size=(*shape, WIDTH)).astype(np.float32),
    )
    return TrainBatch(*map(jnp.asarray, arrays))


def whole_rows(tokens, features=None, hidden=None) -> TrainBatch:
    """Returns rows [B, T] that are a document each, of which every token counts."""
    ones = jnp.ones(tokens.shape, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return TrainBatch(jnp.asarray(tokens, jnp.int32), positions, ones, ones, features, hidden)


def weights_of(module) -> dict[str, jax.Array]:
    return {path: p.get_value() for path, p in parameters.named_parameters(module)}


def random_weights(module, std: float) -> dict[str, jax.Array]:
    """Returns other weights of a module, those of norms around 1."""
    rng, found = np.random.default_rng(1), {}
    for path, array in weights_of(module).items():
        mean, spread = (1.0, 0.3) if path.endswith("scale") else (0.0, std)
        found[path] = jnp.asarray(rng.normal(mean, spread, array.shape), jnp.float32)
    return found


def with_weights(module, weights):
    """Returns a copy of a module with these weights, by path."""
    copy = nnx.clone(module)
    parameters.assign(copy, weights)
    return copy


def loss_and_gradients(module, *arguments, **options):
    """Returns a module's loss, its metrics, and gradients by path."""

    @functools.partial(jax.value_and_grad, has_aux=True)
    def call(weights):
        return with_weights(module, weights).loss(*arguments, **options)

    (loss, metrics), gradients = jax.jit(call)(weights_of(module))
    return loss, metrics, gradients


def observed(drafter, features, heads, *, count=None, tokens=None, capacity: int = 32):
    """Returns a drafter's state after the first `count` features [B, T, ·] of each sequence.

    Within a program, as every operation by itself would compile one.
    """
    batch, rows = features.shape[:2]
    state = zeros(drafter.init_state(batch, capacity))
    tokens = jnp.zeros((batch, rows + 1), jnp.int32) if tokens is None else tokens
    count = jnp.full(batch, rows) if count is None else count
    return drafter.observe(state, jnp.zeros(batch, jnp.int32), tokens, count, features, heads)
