"""Log-probabilities of given completions under the policy, without a cache."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.layers import losses
from dflash.layers.products import matmul_precision
from dflash.models.decoder import Decoder


class TokenLogps:
    """Program that scores the tokens of padded completions."""

    def __init__(self, target: Decoder):
        """Creates the program of a target; its weights may be updated."""
        self._graph, self._params = nnx.graphdef(target), nnx.state(target)

    def __call__(
        self,
        prompts: jax.Array,
        completions: jax.Array,
        pad_id: int,
        temperature: float = 1.0,
    ) -> jax.Array:
        """Returns log-probabilities float32 [B, T].

        Args:
          prompts: int32 [B, P]; padded on the left.
          completions: int32 [B, T]; padded on the right. Padding gets meaningless numbers.
          pad_id: Token of the padding.
          temperature: Divisor of the logits; 0 counts as 1.
        """
        return _score(
            self._graph, self._params, prompts, completions, pad_id, float(temperature or 1.0)
        )


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _score(graph, params, prompts, completions, pad_id: int, temperature: float) -> jax.Array:
    target = nnx.merge(graph, params)
    with jax.default_matmul_precision(matmul_precision(target.dtype)):
        tokens, positions, segment_ids = pack(prompts, completions, pad_id)
        hidden, _ = target.forward(tokens, positions, segment_ids)
        hidden = hidden[:, prompts.shape[1] - 1 : -1]

        def unembed(rows):
            return target.unembed(rows) / temperature

        return -losses.score_tokens(hidden, completions, unembed).objective


def pack(
    prompts: jax.Array, completions: jax.Array, pad_id: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, positions and segment ids of prompts with their completions, [B, P + T]."""
    tokens = jnp.concatenate([prompts, completions], axis=1)
    is_token = tokens != pad_id
    positions = jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0)
    return tokens, positions, is_token.astype(jnp.int32)
