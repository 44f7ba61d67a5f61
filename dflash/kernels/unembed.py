"""Unembedding with its reductions: logits over the vocabulary are looked at and never kept.

What is wanted of hidden @ weights is rarely the logits: a token (the likeliest, or one drawn with a
sequence's noise), the few best, the sum that normalises them. The kernel works these out tile by
tile of the vocabulary, so that the weights are read once and nothing of the size of the vocabulary
is written. A vocabulary that is split over devices stays split: each finds its own winner, and
`join` picks among them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dflash.kernels import implementation as implementations
from dflash.kernels import unembed_tpu


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noise:
    """How the R rows are drawn.

    Attributes:
      keys: uint32 [R, 2]; threefry key data of each row's position.
      temperature: float32 [R]; 0 takes the largest logit.
    """

    keys: jax.Array
    temperature: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unembedded:
    """What became of R rows of logits.

    Attributes:
      token: int32 [R]; of the largest score, the first of them in a tie.
      score: float32 [R]; that score: the logit, or logit / temperature + Gumbel noise.
      logsumexp: float32 [R]; of the logits.
      top_logits: float32 [R, k]; the largest, in descending order.
      top_tokens: int32 [R, k]; theirs; the lower token first in a tie.
    """

    token: jax.Array
    score: jax.Array
    logsumexp: jax.Array
    top_logits: jax.Array
    top_tokens: jax.Array


def unembed(
    hidden: jax.Array,
    weights: jax.Array,
    *,
    transposed: bool = False,
    noise: Noise | None = None,
    num_top: int = 0,
    first_token: jax.Array | int = 0,
    implementation: str = "auto",
) -> Unembedded:
    """Unembeds R rows and reduces them along the vocabulary.

    The noise of token v is that of `jax.random.gumbel(key, [V])[v]` over the whole vocabulary,
    however it is split.

    Args:
      hidden: [R, D]; after the final norm.
      weights: [D, V], or [V, D] if transposed (an embedding that serves as the head too).
      transposed: see there.
      noise: how rows are drawn; None: the largest logit of each.
      num_top: k.
      first_token: int32 []; the token of the first column, where `weights` are a shard.
      implementation: see `implementation.run`.
    Raises:
      ValueError: shapes that do not fit each other; the message names them.
    """
    _check(hidden, weights, transposed, noise, num_top)
    rows = hidden.shape[0]
    if noise is None:
        noise = Noise(jnp.zeros((rows, 2), jnp.uint32), jnp.zeros(rows, jnp.float32))
        sampled = False
    else:
        sampled = True
    options = {"transposed": transposed, "num_top": num_top, "sampled": sampled}
    found = implementations.run(
        implementation,
        hidden,
        weights,
        noise.keys,
        noise.temperature,
        jnp.asarray(first_token, jnp.int32),
        reference=functools.partial(_reference, **options),
        pallas=functools.partial(unembed_tpu.unembed_tpu, **options),
        unsupported=unembed_tpu.unsupported(hidden, weights, transposed, num_top),
    )
    return Unembedded(*found)


def join(parts: Unembedded) -> Unembedded:
    """Picks among the results of S shards of a vocabulary, each array with a leading S.

    Shards are in the order of their tokens, so that a tie goes to the lowest token, as unsharded.
    """
    winner = jnp.argmax(parts.score, axis=0)[None]

    def pick(array):
        return jnp.take_along_axis(array, winner, axis=0)[0]

    num_top = parts.top_logits.shape[-1]
    flat = [jnp.moveaxis(x, 0, 1) for x in (parts.top_logits, parts.top_tokens)]
    logits, tokens = (x.reshape(x.shape[0], -1) for x in flat)
    # Stable, and the candidates stand in the order of their shards.
    order = jnp.argsort(-logits, axis=-1, stable=True)[:, :num_top]
    return Unembedded(
        token=pick(parts.token),
        score=pick(parts.score),
        logsumexp=jax.nn.logsumexp(parts.logsumexp, axis=0),
        top_logits=jnp.take_along_axis(logits, order, axis=-1),
        top_tokens=jnp.take_along_axis(tokens, order, axis=-1),
    )


def gather(part: Unembedded, axes: tuple[str, ...]) -> Unembedded:
    """Inside a shard_map: joins every device's part over mesh axes; a few bytes a row travel."""
    if not axes:
        return part
    return join(jax.tree.map(lambda x: jax.lax.all_gather(x, axes), part))


def _reference(hidden, weights, keys, temperature, first_token, *, transposed, num_top, sampled):
    equation = "rd,vd->rv" if transposed else "rd,dv->rv"
    logits = jnp.einsum(equation, hidden, weights, preferred_element_type=jnp.float32)
    scores = logits
    if sampled:
        tokens = first_token.astype(jnp.uint32) + jnp.arange(logits.shape[1], dtype=jnp.uint32)
        noise = unembed_tpu.gumbel(keys, tokens[None])
        warm = temperature[:, None] > 0
        scores = jnp.where(
            warm, logits / jnp.where(warm, temperature[:, None], 1.0) + noise, logits
        )
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    # top_k keeps the lower index in a tie.
    top_logits, top = jax.lax.top_k(logits, num_top)
    return (
        best + first_token,
        jnp.take_along_axis(scores, best[:, None], axis=-1)[:, 0],
        jax.nn.logsumexp(logits, axis=-1),
        top_logits,
        top.astype(jnp.int32) + first_token,
    )


def _check(hidden, weights, transposed, noise, num_top):
    if hidden.ndim != 2 or weights.ndim != 2:
        raise ValueError(
            f"unembed: hidden {hidden.shape} and weights {weights.shape}, expected 2-D"
        )
    vocab, width = weights.shape if transposed else weights.shape[::-1]
    rows = hidden.shape[0]
    if hidden.shape[1] != width:
        form = "[V, D]" if transposed else "[D, V]"
        raise ValueError(
            f"unembed: hidden {hidden.shape} does not fit weights {weights.shape} {form}"
        )
    if noise is not None and (noise.keys.shape != (rows, 2) or noise.temperature.shape != (rows,)):
        raise ValueError(
            f"unembed: keys {noise.keys.shape} and temperature {noise.temperature.shape}, expected "
            f"{(rows, 2)} and {(rows,)}"
        )
    if not 0 <= num_top <= vocab:
        raise ValueError(f"unembed: num_top {num_top}, expected 0 to {vocab}")
