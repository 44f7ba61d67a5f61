"""Likeliest token of each row, tile by tile over the vocabulary, without the logits in memory.

Greedy decoding takes the argmax of the logits, and sampling that of logits plus Gumbel noise. XLA
fuses the product of a tile of the output head with a reduction to the largest element of each row,
so the logits [B, T, V] are neither written nor read. Each tile draws its own noise, since the noise
of a token is a function of the row's key and the token id.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from dflash.kernels.argmax import argmax
from dflash.parallel import chips
from dflash.parallel.sharding import Sharding

IMPLEMENTATIONS = ("tiles", "reference")
# Columns of the head per tile. By the TPU compiler, quarters of 151,936 columns take less time than
# smaller tiles, halves, and all columns at once; see docs/results/tpu_compile.md.
LARGEST_TILE = 40_960
_LANES = 128  # Tiles begin and end at whole vector registers.
# Bytes of logits per device from which on tiles are used. By the compiler, they take 1.06 times as
# long on v5p with 256 rows of 151,936 logits (156 MB), and 0.77 times with 1,024.
_LEAST_BYTES = 256 << 20


class Noise(NamedTuple):
    """Gumbel noise for each row.

    Attributes:
      keys: uint32 [B, T, 2]; threefry key data, as of `jax.random.key_data`.
      temperature: float32 [B, T]; logits are divided by it. Rows with 0 get no noise.
    """

    keys: jax.Array
    temperature: jax.Array


# The element of each row with the largest score: its score, which is the logit over the temperature
# plus noise; its token id; and, if there is noise, its logit.
Best = tuple[jax.Array, ...]
_LOWEST = np.float32(-np.inf), np.int32(2**31 - 1), np.float32(-np.inf)


def pays(num_rows: int, vocab_size: int, batch: str | None, sharding: Sharding) -> bool:
    """Returns whether tiles save memory and time for `num_rows` rows on all devices together.

    On CPUs, the logits of a few rows are small, and a kernel in C++ multiplies faster than tiles.
    Tiles require that each device holds whole columns of the head, and jax's default generator.
    """
    numbers = num_rows * vocab_size // (sharding.size(batch) * sharding.size("vocab"))
    is_default = jax.config.jax_threefry_partitionable
    is_default &= not jax.config.jax_high_dynamic_range_gumbel
    has_columns = sharding.platform in ("tpu", "gpu") and sharding.size("embed") == 1
    return has_columns and is_default and 4 * numbers >= _LEAST_BYTES


def noise_pays(sharding: Sharding) -> bool:
    """Returns whether tiles pay for sampled rows, too.

    On v5p they take 0.96 times as long by the compiler. For v6e, it takes minutes to compile them.
    """
    chip = chips.of_device_kind(sharding.devices[0].device_kind)
    return chip is not None and chip.name == "v5p"


def unembed_argmax(
    hidden: jax.Array,
    head: jax.Array,
    noise: Noise | None = None,
    *,
    transposed: bool,
    finish: Callable[[jax.Array], jax.Array],
    batch: str | None,
    sharding: Sharding,
    implementation: str = "tiles",
    largest_tile: int = LARGEST_TILE,
) -> tuple[jax.Array, jax.Array]:
    """Returns the token with the largest score in each row, and whether its logit is finite.

    The first of equal scores counts, and a NaN as the largest, as in `jnp.argmax`.

    Args:
      hidden: Hidden states [B, T, D].
      head: Output head [D, V], or [V, D] if transposed; its columns may be sharded by "vocab".
      noise: Noise to add to the scores; None takes the largest logit.
      finish: Element-wise function from products with the head to logits, both float32.
      batch: Logical axis of B; None if it is not sharded.
      implementation: One of `IMPLEMENTATIONS`. The reference computes all logits.
    Returns:
      int32 [B, T] and bool [B, T].
    Raises:
      ValueError: The implementation is unknown.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    logits_of = functools.partial(_logits, transposed=transposed, finish=finish)
    if implementation == "reference":
        return _reference(logits_of(hidden, head), noise)

    def shard(hidden, head, noise):
        first = sharding.index("vocab") * head.shape[not transposed]
        best = _of_shard(hidden, head, noise, first, transposed, logits_of, largest_tile)
        if axes := sharding.axes("vocab"):
            best = _reduce(lax.all_gather(best, axes), axis=0)
        score, token, *logit = best
        return token, jnp.isfinite(*(logit or [score]))

    rows = batch, None
    names = (*rows, None), ("vocab", None) if transposed else (None, "vocab"), rows
    return sharding.map(shard, names, (rows, rows))(hidden, head, noise)


def gumbel(keys: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the elements `tokens` of `jax.random.gumbel(key, [V])`, bit for bit.

    Args:
      keys: uint32 [..., 2]; threefry key data.
      tokens: int32 [N].
    Returns:
      float32 [..., N].
    """
    low = jnp.broadcast_to(tokens.astype(jnp.uint32), (*keys.shape[:-1], *tokens.shape))
    words = (jnp.broadcast_to(keys[..., i, None], low.shape) for i in range(2))
    first, second = threefry2x32_p.bind(*words, jnp.zeros_like(low), low)
    one = jnp.float32(1)
    mantissa = ((first ^ second) >> 9) | lax.bitcast_convert_type(one, jnp.uint32)
    tiny = jnp.finfo(jnp.float32).tiny
    uniform = jnp.maximum(tiny, lax.bitcast_convert_type(mantissa, jnp.float32) - one + tiny)
    return -jnp.log(-jnp.log(uniform))


def _logits(hidden, head, *, transposed, finish) -> jax.Array:
    equation = "...d,vd->...v" if transposed else "...d,dv->...v"
    return finish(jnp.einsum(equation, hidden, head, preferred_element_type=jnp.float32))


def _reference(logits, noise) -> tuple[jax.Array, jax.Array]:
    picked = argmax(_scores(logits, noise, jnp.arange(logits.shape[-1])))
    logit = jnp.take_along_axis(logits, picked[..., None], axis=-1)[..., 0]
    return picked, jnp.isfinite(logit)


def _scores(logits, noise: Noise | None, tokens) -> jax.Array:
    if noise is None:
        return logits
    samples = (noise.temperature > 0)[..., None]
    temperature = jnp.where(samples, noise.temperature[..., None], 1.0)
    return jnp.where(samples, logits / temperature + gumbel(noise.keys, tokens), logits)


def _of_shard(hidden, head, noise, first, transposed, logits_of, largest_tile) -> Best:
    """Returns the best of the columns of one device, whose tokens begin at `first`."""
    columns, axis = head.shape[not transposed], int(not transposed)
    count = -(-columns // largest_tile)
    tile = min(-(-columns // (count * _LANES)) * _LANES, largest_tile, columns)

    def step(i, best):
        # The last tile overlaps the one before it, which changes no maximum.
        start = jnp.minimum(i * tile, columns - tile)
        logits = logits_of(hidden, lax.dynamic_slice_in_dim(head, start, tile, axis))
        tokens = first + start + jnp.arange(tile, dtype=jnp.int32)
        scores = _scores(logits, noise, tokens)
        found = scores, jnp.broadcast_to(tokens, logits.shape), logits
        return _larger(best, _reduce(found[: len(best)], axis=logits.ndim - 1))

    lowest = _LOWEST if noise is not None else _LOWEST[:2]
    start = tuple(jnp.full(hidden.shape[:-1], value) for value in lowest)
    return lax.fori_loop(0, -(-columns // tile), step, start)


def _reduce(arrays: Best, axis: int) -> Best:
    # A single reduction: with a second one, XLA would write the logits to memory.
    return tuple(lax.reduce(arrays, _LOWEST[: len(arrays)], _larger, (axis,)))


def _larger(a: Best, b: Best) -> Best:
    """Returns the larger of two elements by score, and of equal ones that of the lower token."""
    (x, i), (y, j) = a[:2], b[:2]
    equal = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    takes_a = (x > y) | (jnp.isnan(x) & ~jnp.isnan(y)) | (equal & (i < j))
    return tuple(jnp.where(takes_a, one, other) for one, other in zip(a, b, strict=True))
