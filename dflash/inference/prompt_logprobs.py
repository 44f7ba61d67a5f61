"""Log-probabilities of the tokens of a prompt, in a pass of its own before the prefill.

Prefills leave out the output head of all rows but the last, and rows in the prefix cache
altogether. So a prompt whose tokens are scored is computed twice; its program is compiled at the
first prompt of its padded length.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.inference.request import MAX_LOGPROBS, PromptToken
from dflash.layers import cache as kv
from dflash.layers.products import matmul_precision
from dflash.models.decoder import Decoder

_CHUNK = 64  # Rows whose logits are in memory at once.


def compute(
    target: Decoder, params: nnx.State, prompt: tuple[int, ...], num_top: int
) -> tuple[PromptToken, ...]:
    """Returns the tokens of a prompt after the first one, scored by the target's raw logits.

    Args:
      params: Weights of the target.
      num_top: Number of likeliest tokens for each of them.
    """
    length = _CHUNK << max(0, (len(prompt) - 1) // _CHUNK).bit_length()
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(prompt)] = prompt
    batch, _ = kv.batch_axes(1, target.sharding)
    layout = target.sharding.named(tokens.shape, (batch, None))
    placed = jax.make_array_from_callback(tokens.shape, layout, lambda index: tokens[index])
    with jax.default_matmul_precision(matmul_precision(target.dtype)):
        scores = _score(nnx.graphdef(target), params, placed, np.int32(len(prompt)))
    rows = zip(*(np.asarray(each)[: len(prompt) - 1].tolist() for each in scores), strict=True)
    return tuple(
        PromptToken(token, logprob, rank, tuple(ids[:num_top]), tuple(values[:num_top]))
        for token, (logprob, rank, ids, values) in zip(prompt[1:], rows, strict=True)
    )


@functools.partial(jax.jit, static_argnums=0)
def _score(graph, params, tokens, total) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Scores the token after each row of tokens int32 [1, T]; returns arrays [T, ...]."""
    target = nnx.merge(graph, params)
    rows = jnp.arange(tokens.shape[1])
    segments = (rows < total)[None].astype(jnp.int32)
    hidden, _ = target.forward(tokens, rows[None], segments)
    following = jnp.roll(tokens[0], -1)

    def score(rows):
        hidden, following = rows
        raw = jax.nn.log_softmax(target.unembed(hidden[None])[0], axis=-1)
        logprob = jnp.take_along_axis(raw, following[:, None], axis=-1)
        top, ids = jax.lax.top_k(raw, min(MAX_LOGPROBS, raw.shape[-1]))
        return logprob[:, 0], 1 + jnp.sum(raw > logprob, axis=-1), ids, top

    chunks = (hidden.reshape(-1, _CHUNK, hidden.shape[-1]), following.reshape(-1, _CHUNK))
    results = jax.lax.map(score, chunks)
    results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
    # Every process reads all results.
    return jax.lax.with_sharding_constraint(results, target.sharding.replicated())
