"""Top-k and top-p without a sort: finds the last token to keep bit by bit.

Sorting a vocabulary that is sharded over devices would gather it. Here every device counts and sums
its own shard, and devices exchange only these sums.
"""

import functools

import jax
import jax.numpy as jnp

_KEY_BITS = 32
# Bits of the cutoff found per step, with 2**n - 1 sums over the vocabulary. An accelerator computes
# these sums in one pass. On a CPU each takes its own time, to run and to compile.
_STEP_BITS, _STEP_BITS_OF_CPU = 4, 1


def top_k_top_p(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps the nucleus of mass p among the k likeliest tokens; sets all other logits to -inf.

    A token is kept if the mass of all likelier tokens is below p, so the token that crosses p and
    the likeliest token are always kept. Among equal logits the lower token id ranks first.

    Args:
      logits: float32 [B, T, V].
      top_k: int32 [B]; 0 is off.
      top_p: float32 [B]; 1 is off.
    Returns:
      float32 [B, T, V].
    """
    size, keys = logits.shape[-1], _ordered(logits)
    shape = (*logits.shape[:-1], 1)
    keep = jnp.broadcast_to(top_k[:, None, None], shape)
    keep = jnp.where(keep > 0, jnp.minimum(keep, size), size).astype(jnp.float32)
    ones = jnp.ones_like(logits)
    cut = jax.lax.cond(
        jnp.any(top_k > 0),
        lambda: _cutoff(keys, ones, keep, _KEY_BITS),
        lambda: keys.min(axis=-1, keepdims=True),
    )
    count = keep - _sum_above(keys, ones, cut)  # Tokens to keep among those equal to the cutoff.
    cut, count = jax.lax.cond(
        jnp.any(top_p < 1.0),
        lambda: _nucleus(logits, keys, cut, count, top_p),
        lambda: (cut, count),
    )
    token = jax.lax.broadcasted_iota(jnp.uint32, logits.shape, logits.ndim - 1)
    before_end = jnp.uint32(size - 1) - token
    equal = keys == cut

    def lowest() -> jax.Array:
        """Selects the `count` lowest token ids among those equal to the cutoff."""
        last = _cutoff(before_end, equal.astype(jnp.float32), count, size.bit_length())
        return equal & (before_end >= last)

    several = jnp.any(_sum(equal.astype(jnp.float32)) > count)
    with jax.named_scope("if_tied"):
        equal = jax.lax.cond(several, lowest, lambda: equal)
    stays = (keys > cut) | equal
    return jnp.where(stays, logits, -jnp.inf)


def _nucleus(logits, keys, cut, count, top_p) -> tuple[jax.Array, jax.Array]:
    """Finds the cutoff of mass p among the tokens that another cutoff keeps.

    Args:
      logits: float32 [B, T, V].
      keys: uint32 [B, T, V]; see `_ordered`.
      cut: uint32 [B, T, 1]; smallest key that the other cutoff keeps.
      count: float32 [B, T, 1]; number of tokens with this key that it keeps, the lowest ids.
      top_p: float32 [B].
    Returns:
      The smallest key to keep, and the number of tokens to keep with this key.
    """
    most = keys.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))

    def weight_of(key) -> jax.Array:
        return jnp.where(keys == key, weights, 0.0).max(axis=-1, keepdims=True)

    mass = _sum_above(keys, weights, cut) + count * weight_of(cut)
    goal = top_p[:, None, None] * mass
    least = jnp.clip(_cutoff(keys, weights, goal, _KEY_BITS), cut, most)
    weight = weight_of(least)
    fitting = jnp.ceil((goal - _sum_above(keys, weights, least)) / weight)
    equals = jnp.where(least == cut, count, _sum((keys == least).astype(jnp.float32)))
    fitting = jnp.where(weight > 0, jnp.clip(fitting, 1.0, equals), equals)
    enabled = top_p[:, None, None] < 1.0
    return jnp.where(enabled, least, cut), jnp.where(enabled, fitting, count)


def _cutoff(keys: jax.Array, weights: jax.Array, goal: jax.Array, bits: int) -> jax.Array:
    """Finds the largest key such that the weights of this and larger keys sum to at least `goal`.

    Args:
      keys: uint32 [B, T, V].
      weights: float32 [B, T, V], not negative.
      goal: float32 [B, T, 1].
      bits: Number of bits of the largest key.
    Returns:
      uint32 [B, T, 1]; 0 if all weights sum to less than `goal`.
    """
    on_cpu, otherwise = (
        functools.partial(_search, bits=bits, step_bits=step_bits)
        for step_bits in (_STEP_BITS_OF_CPU, _STEP_BITS)
    )
    return jax.lax.platform_dependent(keys, weights, goal, cpu=on_cpu, default=otherwise)


def _search(
    keys: jax.Array, weights: jax.Array, goal: jax.Array, bits: int, step_bits: int
) -> jax.Array:
    """Finds the key of `_cutoff`, `step_bits` of its bits per step."""
    steps = -(-bits // step_bits)

    def find_digit(step, prefix):
        shift = ((steps - 1 - step) * step_bits).astype(jnp.uint32)
        tried = [prefix | (jnp.uint32(digit) << shift) for digit in range(1, 2**step_bits)]
        enough = [_sum(jnp.where(keys >= key, weights, 0.0)) >= goal for key in tried]
        # Sums decrease with the key, so the digit is the number of keys that reach the goal.
        digit = sum(reached.astype(jnp.uint32) for reached in enough)
        return prefix | (digit << shift)

    return jax.lax.fori_loop(0, steps, find_digit, jnp.zeros(goal.shape, jnp.uint32))


def _ordered(values: jax.Array) -> jax.Array:
    """Maps float32 values to uint32 keys in the same order; equal values have equal keys."""
    values = jnp.where(values == 0, 0.0, values)  # Maps -0.0 to 0.0.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _sum_above(keys: jax.Array, weights: jax.Array, cut: jax.Array) -> jax.Array:
    return _sum(jnp.where(keys > cut, weights, 0.0))


def _sum(values: jax.Array) -> jax.Array:
    return values.sum(axis=-1, keepdims=True)
