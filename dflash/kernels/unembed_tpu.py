"""The Pallas kernel of unembedding; see unembed.py for what it computes.

One step per tile of the vocabulary: its weights arrive while the last tile is reduced, and only the
winners so far are carried from step to step.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Largest tile of weights, of which two are in VMEM at a time, and what a kernel may use of it.
TILE_BYTES = 6 * 2**20
VMEM_BYTES = 48 * 2**20
_LANES = 128
_TILES = (2048, 1024, 512, 256, 128)
MAX_TOP = _LANES
_MASKED = -1e30
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def tile_tokens(width: int, itemsize: int) -> int:
    """Tokens per tile: as many as `TILE_BYTES` hold, and at least a row of lanes."""
    fitting = [tile for tile in _TILES if tile * width * itemsize <= TILE_BYTES]
    return fitting[0] if fitting else _TILES[-1]


def unsupported(hidden, weights, transposed: bool, num_top: int) -> str | None:
    """Why the kernel does not cover these arguments; None if it does."""
    rows, width = hidden.shape
    if num_top > MAX_TOP:
        return f"unembed: num_top {num_top} is over {MAX_TOP}"
    tile = tile_tokens(width, weights.dtype.itemsize)
    held = _padded(rows, hidden.dtype) * width * hidden.dtype.itemsize
    tiles = 2 * tile * width * weights.dtype.itemsize
    # Logits, scores, noise and token numbers of a tile, and what comes of them on the way.
    work = 8 * _padded(rows, hidden.dtype) * (tile + _LANES) * 4
    if 2 * held + tiles + work > VMEM_BYTES:
        return (
            f"unembed: {rows} rows of {width} ({2 * held / 2**20:.1f} MiB), two tiles of {tile} "
            f"tokens ({tiles / 2**20:.1f} MiB) and their scores ({work / 2**20:.1f} MiB) exceed "
            f"{VMEM_BYTES / 2**20:.0f} MiB of VMEM"
        )
    return None


def unembed_tpu(
    hidden, weights, keys, temperature, first_token, *, transposed, num_top, sampled, interpret
):
    """Arguments as those of `unembed`; returns the fields of `Unembedded`."""
    rows, width = hidden.shape
    vocab = weights.shape[0 if transposed else 1]
    tile = tile_tokens(width, weights.dtype.itemsize)
    padded = _padded(rows, hidden.dtype)

    def pad(array):
        return jnp.pad(array, ((0, padded - rows), (0, 0)))

    block, index = ((tile, width), lambda i, _: (i, 0))
    if not transposed:
        block, index = ((width, tile), lambda i, _: (0, i))
    whole = lambda columns: pl.BlockSpec((padded, columns), lambda i, _: (0, 0))  # noqa: E731
    columns = (1, 1, 1, 1, _LANES, _LANES)
    dtypes = (jnp.int32, jnp.float32, jnp.float32, jnp.float32, jnp.float32, jnp.int32)
    token, score, peak, total, top_logits, top_tokens = pl.pallas_call(
        functools.partial(
            _kernel, tile=tile, vocab=vocab, transposed=transposed, num_top=num_top, sampled=sampled
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(math.ceil(vocab / tile),),
            in_specs=[whole(width), pl.BlockSpec(block, index), whole(2), whole(1)],
            out_specs=[whole(count) for count in columns],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((padded, count), dtype)
            for count, dtype in zip(columns, dtypes, strict=True)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * padded * width * vocab,
            bytes_accessed=weights.size * weights.dtype.itemsize,
            transcendentals=padded * vocab * (3 if sampled else 1),
        ),
        interpret=interpret,
        name="unembed",
    )(
        first_token[None],
        pad(hidden),
        weights,
        pad(jax.lax.bitcast_convert_type(keys, jnp.int32)),
        pad(temperature[:, None]),
    )
    return (
        token[:rows, 0],
        score[:rows, 0],
        (peak + jnp.log(total))[:rows, 0],
        top_logits[:rows, :num_top],
        top_tokens[:rows, :num_top],
    )


def _kernel(
    first_ref, hidden_ref, weights_ref, keys_ref, temperature_ref,
    token_ref, score_ref, peak_ref, total_ref, top_logits_ref, top_tokens_ref,
    *, tile, vocab, transposed, num_top, sampled,
):  # fmt: skip
    step = pl.program_id(0)
    last_token = jnp.iinfo(jnp.int32).max

    @pl.when(step == 0)
    def _():
        token_ref[...] = jnp.zeros_like(token_ref)
        score_ref[...] = jnp.full_like(score_ref, -jnp.inf)
        peak_ref[...] = jnp.full_like(peak_ref, _MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)
        top_logits_ref[...] = jnp.full_like(top_logits_ref, -jnp.inf)
        top_tokens_ref[...] = jnp.full_like(top_tokens_ref, last_token)

    hidden = hidden_ref[...]
    logits = jax.lax.dot_general(
        hidden,
        weights_ref[...],
        (((1,), (1 if transposed else 0,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None,
    )
    column = step * tile + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    tokens = first_ref[0] + column
    inside = column < vocab
    logits = jnp.where(inside, logits, -jnp.inf)

    scores = logits
    if sampled:
        temperature = temperature_ref[...]
        warm = temperature > 0
        keys = jax.lax.bitcast_convert_type(keys_ref[...], jnp.uint32)
        noise = gumbel(keys, jax.lax.bitcast_convert_type(tokens, jnp.uint32))
        drawn = logits / jnp.where(warm, temperature, 1.0) + noise
        scores = jnp.where(warm, jnp.where(inside, drawn, -jnp.inf), logits)
    best = jnp.max(scores, axis=1, keepdims=True)
    chosen = jnp.min(jnp.where(scores == best, tokens, last_token), axis=1, keepdims=True)
    # Strictly: in a tie the earlier tile has the lower token.
    better = best > score_ref[...]
    token_ref[...] = jnp.where(better, chosen, token_ref[...])
    score_ref[...] = jnp.where(better, best, score_ref[...])

    peak = jnp.maximum(peak_ref[...], jnp.max(logits, axis=1, keepdims=True))
    kept = total_ref[...] * jnp.exp(peak_ref[...] - peak)
    total_ref[...] = kept + jnp.sum(jnp.exp(logits - peak), axis=1, keepdims=True)
    peak_ref[...] = peak

    if num_top:
        _merge_top(logits, tokens, top_logits_ref, top_tokens_ref, num_top)


def _merge_top(logits, tokens, top_logits_ref, top_tokens_ref, num_top):
    """Takes the largest out of the tile and of what was kept, one after the other."""
    last_token = jnp.iinfo(jnp.int32).max
    logits = jnp.concatenate([top_logits_ref[...], logits], axis=1)
    tokens = jnp.concatenate([top_tokens_ref[...], tokens], axis=1)
    lane = jax.lax.broadcasted_iota(jnp.int32, top_logits_ref.shape, 1)
    kept_logits = jnp.full_like(top_logits_ref, -jnp.inf)
    kept_tokens = jnp.full_like(top_tokens_ref, last_token)
    for place in range(num_top):
        largest = jnp.max(logits, axis=1, keepdims=True)
        token = jnp.min(jnp.where(logits == largest, tokens, last_token), axis=1, keepdims=True)
        kept_logits = jnp.where(lane == place, largest, kept_logits)
        kept_tokens = jnp.where(lane == place, token, kept_tokens)
        logits = jnp.where(tokens == token, -jnp.inf, logits)
    top_logits_ref[...] = kept_logits
    top_tokens_ref[...] = kept_tokens


def gumbel(keys: jax.Array, counts: jax.Array) -> jax.Array:
    """Gumbel noise, bit for bit that of `jax.random.gumbel(key, [V])` at the entries `counts`.

    Args:
      keys: uint32 [R, 2]; threefry key data.
      counts: uint32, broadcastable to [R, T].
    Returns:
      float32 [R, T].
    Source: Salmon et al. 2011 (Threefry-2x32, 20 rounds); jax's partitionable counters.
    """
    bits = _threefry(keys[:, :1], keys[:, 1:], counts)
    # 23 bits of mantissa under an exponent of one, then down to [tiny, 1).
    mantissa = jax.lax.shift_right_logical(bits, jnp.uint32(9)) | jnp.uint32(0x3F800000)
    tiny = np.finfo(np.float32).tiny
    unit = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    uniform = jnp.maximum(tiny, unit * (np.float32(1) - tiny) + tiny)
    return -jnp.log(-jnp.log(uniform))


def _threefry(first_key: jax.Array, second_key: jax.Array, counts: jax.Array) -> jax.Array:
    """The two words of the hash of (0, count), added without carry."""
    keys = (first_key, second_key, first_key ^ second_key ^ jnp.uint32(_PARITY))
    left = jnp.zeros_like(counts) + keys[0]
    right = counts + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            left = left + right
            turned = jax.lax.shift_left(right, jnp.uint32(distance))
            rest = jax.lax.shift_right_logical(right, jnp.uint32(32 - distance))
            right = (turned | rest) ^ left
        left = left + keys[(group + 1) % 3]
        right = right + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return left ^ right


def _padded(rows: int, dtype) -> int:
    """Rows rounded up to whole tiles of memory."""
    step = 8 * 4 // jnp.dtype(dtype).itemsize
    return -(-rows // step) * step
