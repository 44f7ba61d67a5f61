"""The first token of an output, which comes from the prompt's own pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash.inference import controls, logprobs, nonfinite
from dflash.inference.controls import Controls
from dflash.inference.logprobs import Logprobs
from dflash.inference.request import Request
from dflash.inference.sampling import SamplingParams, SequenceSampler
from dflash.parallel.sharding import Sharding
from dflash.text import grammar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FirstTokenConstraints:
    """What n sequences ask of their first tokens.

    Attributes:
      controls: what shapes their logits; `text` holds the prompts.
      allowed: int32 [n, ceil(V / 32)]; tokens that may be drawn; see `allowed_first`.
    """

    controls: Controls
    allowed: jax.Array


def draw(
    logits: jax.Array, length: jax.Array, sampling: SamplingParams, asked: FirstTokenConstraints
) -> tuple[jax.Array, Logprobs]:
    """Draws the token after each prompt.

    Args:
      logits: float32 [n, 1, V]; after the last token of each.
      length: int32 [n]; tokens of each.
      sampling: how each sequence draws.
      asked: by the sequences.
    Returns:
      tokens int32 [n], `nonfinite.NO_TOKEN` where logits are not finite; log-probabilities [n].
    """

    def judge(logits):
        drawn = SequenceSampler(sampling).sample(logits, length[:, None])
        return drawn, nonfinite.finite_rows(logits, drawn)

    def judge_shaped():
        nothing = jnp.zeros((logits.shape[0], 0), jnp.int32)
        # Stop tokens that come too early are not allowed in the first place.
        shaped = controls.shape_logits(
            logits, own, length, nothing, nothing, allowed=asked.allowed[:, None]
        )
        return judge(shaped)

    own = asked.controls
    shapes = own.shapes(length, jnp.ones(length.shape, bool)) | jnp.any(asked.allowed != -1)
    with jax.named_scope("if_shaped"):
        drawn, sound = jax.lax.cond(shapes, judge_shaped, lambda: judge(logits))
    found = logprobs.of_tokens(logits, drawn, own.logprobs)
    tokens = jnp.where(sound, drawn, nonfinite.NO_TOKEN)[:, 0]
    return tokens, jax.tree.map(lambda x: x[:, 0], found)


def num_words(vocab_size: int) -> int:
    """Words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


def abstract(
    lanes: int, max_length: int, vocab_size: int, sharding: Sharding
) -> FirstTokenConstraints:
    """Shapes of what the sequences of `lanes` lanes ask for, on every device."""
    return FirstTokenConstraints(
        controls.abstract(lanes, None, max_length, sharding),
        sharding.abstract((lanes, num_words(vocab_size)), (None, None), jnp.int32),
    )


def plain(lanes: int, max_length: int, vocab_size: int) -> FirstTokenConstraints:
    """What the sequences of `lanes` lanes ask for that ask for nothing; numpy arrays."""
    allowed = np.tile(allow_all(vocab_size), (lanes, 1))
    return FirstTokenConstraints(controls.plain(lanes, max_length), allowed)


def allow_all(vocab_size: int) -> np.ndarray:
    """The mask that allows every token."""
    return np.full(num_words(vocab_size), -1, np.int32)


def allowed_first(request: Request, matcher: grammar.Matcher | None, vocab_size: int) -> np.ndarray:
    """The mask of a request's first token, int32 [ceil(V / 32)].

    Args:
      request: with its grammar, its stop tokens and its least number of tokens.
      matcher: of the grammar, at the beginning of the output.
      vocab_size: of the target.
    """
    mask = allow_all(vocab_size)
    if matcher is not None:
        matcher.fill(mask[None], ends=request.stop_ids, first_end=request.min_new_tokens)
    elif request.min_new_tokens:
        grammar.forbid(mask, request.stop_ids)
    return mask
