"""Log-probabilities of committed tokens and of the target's likeliest alternatives.

They are computed in the pass that verifies the tokens: from the target's raw logits, and for each
committed token also from the distribution that it was drawn from. Nothing of the vocabulary's size
is computed unless a sequence requests them.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dflash.inference.logits.sampling import SamplingParams, filter_logits
from dflash.inference.request import MAX_LOGPROBS, TokenLogprobs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of tokens [...], with N = min(MAX_LOGPROBS, V) alternatives.

    Attributes:
      drawn: float32 [...]; log-probability of the committed token.
      sampled: float32 [...]; its log-probability after controls, temperature and filters.
      top_ids: int32 [..., N]; likeliest tokens, most likely first.
      top: float32 [..., N]; log-probabilities of `top_ids`.
    """

    drawn: jax.Array
    sampled: jax.Array
    top_ids: jax.Array
    top: jax.Array

    def of(self, index: tuple[int, ...], count: int, num_top: int) -> list[TokenLogprobs]:
        """Returns the first `count` entries at `index`, each with `num_top` alternatives."""
        drawn, top = self.drawn[index][:count].tolist(), self.top[index][:count, :num_top].tolist()
        top_ids = self.top_ids[index][:count, :num_top].tolist()
        sampled = self.sampled[index][:count].tolist()
        return [
            TokenLogprobs(logprob, tuple(ids), tuple(values), other)
            for logprob, ids, values, other in zip(drawn, top_ids, top, sampled, strict=True)
        ]


def zeros(shape: Sequence[int], vocab_size: int) -> Logprobs:
    """Returns zero-filled `Logprobs` of the given shape."""
    count = min(MAX_LOGPROBS, vocab_size)
    return Logprobs(
        drawn=jnp.zeros(shape, jnp.float32),
        sampled=jnp.zeros(shape, jnp.float32),
        top_ids=jnp.zeros((*shape, count), jnp.int32),
        top=jnp.zeros((*shape, count), jnp.float32),
    )


def of_tokens(
    rows: Callable[[], tuple[jax.Array, jax.Array]],
    params: SamplingParams,
    tokens: jax.Array,
    requested: jax.Array,
    vocab_size: int,
) -> Logprobs:
    """Computes log-probabilities of tokens if any sequence requests them; returns zeros otherwise.

    Args:
      rows: Returns the logits that each token follows, float32 [B, T, V]: those of the target, and
        after the sequences' controls. Called where they are needed.
      params: Sampling parameters of the B sequences; a greedy one counts as temperature 1.
      tokens: int32 [B, T].
      requested: bool [B]; sequences that request log-probabilities.
    """

    def compute():
        plain, shaped = rows()
        raw = jax.nn.log_softmax(plain, axis=-1)
        filtered = jax.nn.log_softmax(filter_logits(shaped, params), axis=-1)
        top, top_ids = jax.lax.top_k(raw, min(MAX_LOGPROBS, vocab_size))
        drawn, sampled = (
            jnp.take_along_axis(each, tokens[..., None], axis=-1)[..., 0]
            for each in (raw, filtered)
        )
        return Logprobs(drawn, sampled, top_ids.astype(jnp.int32), top)

    with jax.named_scope("if_logprobs"):
        return jax.lax.cond(jnp.any(requested), compute, lambda: zeros(tokens.shape, vocab_size))
