"""Logits that are not finite: noticed in every cycle at no cost, explained only when it happened.

An argmax over logits with a NaN is that NaN's index, so a row is sound if the one logit that it
picks is finite. Nothing else of [rows, V] is read again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash import errors
from dflash.inference.request import Request
from dflash.layers.cache import PagedCache
from dflash.models.decoder import Decoder
from dflash.parallel import parameters

NO_TOKEN = -1  # in place of a token that a prefill could not draw


def finite_rows(logits: jax.Array, picked: jax.Array) -> jax.Array:
    """Whether the logit that each row picks is finite.

    Args:
      logits: float32 [B, R, V].
      picked: int32 [B, R]; each row's argmax, noise added or not.
    Returns:
      bool [B, R].
    """
    return jnp.isfinite(jnp.take_along_axis(logits, picked[..., None], axis=-1)[..., 0])


def examine_chunk(
    target: Decoder, cache: PagedCache, tokens: jax.Array, start: jax.Array, count: jax.Array
) -> tuple[PagedCache, jax.Array]:
    """Runs a chunk of a sequence and looks at everything that is computed on the way.

    Args:
      target: the model.
      cache: of everything before `start`; batch 1.
      tokens: int32 [1, T], of which `count` are the sequence's.
      start, count: int32 [].
    Returns:
      the cache, and whether each of `stages` gave finite values, bool [stages].
    """
    positions = start + jnp.arange(tokens.shape[1])[None]
    depth = target.arch.num_hidden_layers
    output = target(tokens, positions, cache, feature_layers=tuple(range(depth)))
    layers = output.features.reshape(*tokens.shape, depth, -1)
    last = jnp.reshape(count - 1, (1, 1, 1))
    logits = target.unembed(jnp.take_along_axis(output.hidden, last, axis=1))
    counted = jnp.arange(tokens.shape[1]) < count

    def sound(rows):
        return jnp.all(jnp.isfinite(rows) | ~counted.reshape(1, -1, *[1] * (rows.ndim - 2)))

    by_layer = [sound(layers[:, :, i]) for i in range(depth)]
    ends = sound(output.hidden), jnp.isfinite(logits).all()
    return output.cache, jnp.stack([sound(target.embed(tokens)), *by_layer, *ends])


def stages(target: Decoder) -> list[tuple[str, str]]:
    """What a forward consists of, in order: names, and the paths of their parameters."""
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
    target: Decoder, request: Request, said: Sequence[int], sound: Sequence[bool] | None
) -> errors.NumericsError:
    """What ends the run.

    Args:
      target: with its weights.
      request: the sequence.
      said: its output before the token that could not be drawn.
      sound: of each of `stages`; None where there was no memory to find out.
    """
    position = len(request.prompt) + len(said)
    where = (
        f"prompt {request.id}: the target's logits for token {len(said) + 1} of the output "
        f"(position {position}) are not finite"
    )
    if sound is None:
        return errors.NumericsError(f"{where}; no memory is left to find the layer")
    wrong = [stage for stage, fine in zip(stages(target), sound, strict=True) if not fine]
    if not wrong:
        return errors.NumericsError(f"{where}, but computed once more they are: check the machine")
    name, path = wrong[0]
    damaged = [one for one in _damaged(target) if one.startswith(path)]
    if damaged:
        reason = f"its weights are not: {target.checkpoint_name(damaged[0])}"
    else:
        reason = f"its weights are finite, so its values exceed {target.dtype}"
    return errors.NumericsError(f"{where}; the first that gives such values is {name}: {reason}")


def _damaged(target: Decoder) -> list[str]:
    """Paths of the parameters that are not finite."""
    finite = jax.jit(lambda x: jnp.isfinite(x).all())
    return [
        path for path, param in parameters.named_parameters(target) if not finite(param.get_value())
    ]
