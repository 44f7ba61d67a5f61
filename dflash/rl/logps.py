"""Log-probabilities of given completions under the policy, without a cache."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.layers import losses
from dflash.layers.products import matmul_precision
from dflash.models.decoder import Decoder


class Scores(NamedTuple):
    """Results of a pass over prompts [B, P] with their completions [B, T].

    Attributes:
      logps: Log-probabilities of the completions' tokens, float32 [B, T].
      outputs: The policy's outputs of all P + T rows: "features" [B, P + T, C·D] and "hidden"
        [B, P + T, D]. Empty if no features are wanted.
    """

    logps: jax.Array
    outputs: dict[str, jax.Array]


class TokenLogps:
    """Program that scores the tokens of padded completions."""

    def __init__(self, target: Decoder, feature_layers: tuple[int, ...] = ()):
        """Creates the program of a target; its weights may be updated.

        Args:
          feature_layers: Layers whose outputs become features, for the training of a drafter.
        """
        self._graph, self._params = nnx.graphdef(target), nnx.state(target)
        self._feature_layers = feature_layers

    def __call__(
        self,
        prompts: jax.Array,
        completions: jax.Array,
        pad_id: int,
        temperature: float = 1.0,
    ) -> Scores:
        """Scores completions.

        Args:
          prompts: int32 [B, P]; padded on the left.
          completions: int32 [B, T]; padded on the right. Padding gets meaningless numbers.
          temperature: Divisor of the logits; 0 counts as 1.
        """
        how = self._feature_layers, pad_id, float(temperature or 1.0)
        return _score(self._graph, self._params, prompts, completions, *how)


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _score(
    graph, params, prompts, completions, feature_layers, pad_id: int, temperature: float
) -> Scores:
    target = nnx.merge(graph, params)
    with jax.default_matmul_precision(matmul_precision(target.dtype)):
        rows = pack(prompts, completions, pad_id)
        hidden, features = target.forward(*rows, feature_layers=feature_layers)

        def unembed(rows):
            return target.unembed(rows) / temperature

        predicting = hidden[:, prompts.shape[1] - 1 : -1]
        logps = -losses.score_tokens(predicting, completions, unembed).objective
        return Scores(logps, {"features": features, "hidden": hidden} if feature_layers else {})


def pack(
    prompts: jax.Array, completions: jax.Array, pad_id: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, positions and segment ids of prompts with their completions, [B, P + T]."""
    tokens = jnp.concatenate([prompts, completions], axis=1)
    is_token = tokens != pad_id
    positions = jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0)
    return tokens, positions, is_token.astype(jnp.int32)
