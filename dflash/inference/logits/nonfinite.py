"""Detection of non-finite logits in every cycle, and their explanation after a failure.

The argmax over logits that contain a NaN is that NaN's index, so it suffices to check the one logit
that each row picks. No other element of [rows, V] is read again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash import errors
from dflash.inference.request import Request
from dflash.layers.cache import PagedCache
from dflash.models.decoder import Decoder
from dflash.parallel import parameters

NO_TOKEN = -1  # Placeholder for a token that a prefill could not draw.


def finite_rows(logits: jax.Array, picked: jax.Array) -> jax.Array:
    """Returns whether the logit that each row picks is finite.

    Args:
      logits: float32 [B, R, V].
      picked: int32 [B, R]; argmax of each row, with or without noise.
    Returns:
      bool [B, R].
    """
    return jnp.isfinite(jnp.take_along_axis(logits, picked[..., None], axis=-1)[..., 0])


def examine_chunk(
    target: Decoder,
    cache: PagedCache,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    adapter: jax.Array,
) -> tuple[PagedCache, jax.Array]:
    """Runs a chunk of a sequence and checks the output of every stage for non-finite values.

    Args:
      cache: Cache of the positions before `start`, with batch size 1.
      tokens: int32 [1, T]; the first `count` belong to the sequence.
      start: int32 []; position of the first token.
      count: int32 []; number of valid tokens.
      adapter: int32 []; number of the sequence's adapter.
    Returns:
      The cache, and whether each of `stages` gave finite values, bool [stages].
    """
    positions = start + jnp.arange(tokens.shape[1])[None]
    depth = target.arch.num_hidden_layers
    output = target(
        tokens,
        positions,
        cache,
        feature_layers=tuple(range(depth)),
        count=jnp.reshape(count, 1),
        adapters=jnp.reshape(adapter, 1),
    )
    layers = output.features.reshape(*tokens.shape, depth, -1)
    last = jnp.reshape(count - 1, (1, 1, 1))
    logits = target.unembed(jnp.take_along_axis(output.hidden, last, axis=1))
    counted = jnp.arange(tokens.shape[1]) < count

    def finite(rows):
        return jnp.all(jnp.isfinite(rows) | ~counted.reshape(1, -1, *[1] * (rows.ndim - 2)))

    by_layer = [finite(layers[:, :, i]) for i in range(depth)]
    ends = finite(output.hidden), jnp.isfinite(logits).all()
    return output.cache, jnp.stack([finite(target.embed(tokens)), *by_layer, *ends])


def stages(target: Decoder) -> list[tuple[str, str]]:
    """Returns the stages of a forward pass in order, as (name, parameter path prefix) pairs."""
    depth = target.arch.num_hidden_layers
    layers = [(f"layer {i} (of 0 to {depth - 1})", f"layers.{i}.") for i in range(depth)]
    head = "embed_tokens." if target.lm_head is None else "lm_head."
    return [
        ("the embedding", "embed_tokens."),
        *layers,
        ("the final norm", "norm."),
        ("the output head", head),
    ]


def error(
    target: Decoder, request: Request, output_ids: Sequence[int], finite: Sequence[bool] | None
) -> errors.NumericsError:
    """Returns the error that reports where non-finite logits came from.

    Args:
      output_ids: Output before the token that could not be sampled.
      finite: Whether each of `stages` is finite; None if there was no memory to find out.
    """
    position = len(request.prompt) + len(output_ids)
    where = (
        f"prompt {request.id}: the target's logits for token {len(output_ids) + 1} of the output "
        f"(position {position}) are not finite"
    )
    if finite is None:
        return errors.NumericsError(f"{where}; no memory is left to find the layer")
    wrong = [stage for stage, fine in zip(stages(target), finite, strict=True) if not fine]
    if not wrong:
        return errors.NumericsError(f"{where}, but computed once more they are: check the machine")
    name, path = wrong[0]
    damaged = [parameter for parameter in _damaged(target) if parameter.startswith(path)]
    if damaged:
        reason = f"its weights are not: {target.checkpoint_name(damaged[0])}"
    else:
        reason = f"its weights are finite, so its values exceed {target.dtype}"
    return errors.NumericsError(f"{where}; the first that gives such values is {name}: {reason}")


def _damaged(target: Decoder) -> list[str]:
    """Returns the paths of parameters with non-finite values."""
    finite = jax.jit(lambda x: jnp.isfinite(x).all())
    return [
        path for path, param in parameters.named_parameters(target) if not finite(param.get_value())
    ]
