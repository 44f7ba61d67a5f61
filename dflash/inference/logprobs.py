"""Log-probabilities of committed tokens, and of the target's likeliest ones in their places.

They are of the target's raw logits, from the very pass that verified the tokens. Nothing of the
vocabulary's size is computed while no sequence asks for them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash.inference.request import MAX_LOGPROBS, TokenLogprobs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Of tokens [...]; N = MAX_LOGPROBS, or the vocabulary if that is smaller.

    Attributes:
      drawn: float32 [...]; of the committed token.
      top_ids: int32 [..., N]; the likeliest tokens, the best first.
      top: float32 [..., N]; theirs.
    """

    drawn: jax.Array
    top_ids: jax.Array
    top: jax.Array

    def of(self, index: tuple[int, ...], count: int, wanted: int) -> list[TokenLogprobs]:
        """The first `count` tokens of row `index`, each with the `wanted` likeliest ones."""
        drawn, top = self.drawn[index][:count].tolist(), self.top[index][:count, :wanted].tolist()
        top_ids = self.top_ids[index][:count, :wanted].tolist()
        return [
            TokenLogprobs(one, tuple(ids), tuple(values))
            for one, ids, values in zip(drawn, top_ids, top, strict=True)
        ]


def zeros(shape: Sequence[int], vocab_size: int) -> Logprobs:
    """What stands for tokens [*shape] whose log-probabilities nobody asked for."""
    count = min(MAX_LOGPROBS, vocab_size)
    return Logprobs(
        drawn=jnp.zeros(shape, jnp.float32),
        top_ids=jnp.zeros((*shape, count), jnp.int32),
        top=jnp.zeros((*shape, count), jnp.float32),
    )


def of_tokens(
    logits: jax.Array, tokens: jax.Array, wanted: jax.Array, rows: jax.Array | None = None
) -> Logprobs:
    """Log-probabilities of tokens, if any sequence wants them; else zeros.

    Args:
      logits: float32 [B, R, V]; the target's own.
      tokens: int32 [B, T]; token t follows row rows[b, t].
      wanted: bool [B].
      rows: int32 [B, T]; None: T = R, and token t follows row t.
    """

    def compute():
        own = logits
        if rows is not None:
            own = jnp.take_along_axis(logits, rows[..., None], axis=1)
        own = jax.nn.log_softmax(own, axis=-1)
        top, top_ids = jax.lax.top_k(own, min(MAX_LOGPROBS, logits.shape[-1]))
        drawn = jnp.take_along_axis(own, tokens[..., None], axis=-1)[..., 0]
        return Logprobs(drawn, top_ids.astype(jnp.int32), top)

    with jax.named_scope("if_logprobs"):
        return jax.lax.cond(jnp.any(wanted), compute, lambda: zeros(tokens.shape, logits.shape[-1]))
