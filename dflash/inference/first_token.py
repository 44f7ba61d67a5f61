"""Sampling of the first output token, from the logits of the prefill."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dflash.inference.logits import controls, logprobs, nonfinite
from dflash.inference.logits.controls import Controls
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.logits.sampling import SamplingParams, SequenceSampler
from dflash.inference.request import Request
from dflash.parallel.sharding import Sharding
from dflash.text import grammar
from dflash.text.token_rules import RulesMatcher


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FirstTokenConstraints:
    """Constraints on the first tokens of n sequences.

    Attributes:
      controls: Logit controls; `token_ids` holds the prompts.
      allowed: int32 [n, ceil(V / 32)]; bit mask of allowed tokens, see `allowed_first`.
    """

    controls: Controls
    allowed: jax.Array


def draw(
    logits: jax.Array,
    length: jax.Array,
    sampling: SamplingParams,
    constraints: FirstTokenConstraints,
) -> tuple[jax.Array, Logprobs]:
    """Samples the token after each prompt.

    Args:
      logits: float32 [n, 1, V]; logits after the last token of each prompt.
      length: int32 [n]; number of tokens of each prompt.
    Returns:
      Tokens int32 [n], `nonfinite.NO_TOKEN` where logits are not finite; log-probabilities [n].
    """

    def judge(logits):
        drawn = SequenceSampler(sampling).sample(logits, length[:, None])
        return drawn, nonfinite.finite_rows(logits, drawn)

    def shape(logits):
        nothing = jnp.zeros((logits.shape[0], 0), jnp.int32)
        # `allowed` already excludes stop tokens before min_new_tokens.
        return controls.shape_logits(
            logits, shaping, length, nothing, nothing, allowed=constraints.allowed[:, None]
        )

    shaping = constraints.controls
    masked = jnp.any(constraints.allowed != -1)
    shapes = shaping.shapes(length, jnp.ones(length.shape, bool)) | masked
    with jax.named_scope("if_shaped"):
        drawn, finite = jax.lax.cond(shapes, lambda: judge(shape(logits)), lambda: judge(logits))
    rows, vocab_size = lambda: (logits, shape(logits)), logits.shape[-1]
    drawn_logprobs = logprobs.of_tokens(rows, sampling, drawn, shaping.logprobs, vocab_size)
    tokens = jnp.where(finite, drawn, nonfinite.NO_TOKEN)[:, 0]
    return tokens, jax.tree.map(lambda x: x[:, 0], drawn_logprobs)


def num_words(vocab_size: int) -> int:
    """Returns the number of int32 words of a bit mask over the vocabulary."""
    return -(-vocab_size // 32)


def abstract(
    batch: int, max_length: int, vocab_size: int, sharding: Sharding
) -> FirstTokenConstraints:
    """Returns abstract constraints of `batch` sequences, replicated on every device."""
    return FirstTokenConstraints(
        controls.abstract(batch, None, max_length, sharding),
        sharding.abstract((batch, num_words(vocab_size)), (None, None), jnp.int32),
    )


def with_rows(
    constraints: FirstTokenConstraints, rows: Mapping[int, FirstTokenConstraints]
) -> FirstTokenConstraints:
    """Returns constraints in which those of `rows`, by index, replace those of some sequences."""
    if not rows:
        return constraints
    host = jax.tree.map(np.array, constraints)
    for i, row in rows.items():
        jax.tree.map(lambda array, value, i=i: array.__setitem__(i, value), host, row)
    return host


def unconstrained(batch: int, max_length: int, vocab_size: int) -> FirstTokenConstraints:
    """Returns the constraints of `batch` unconstrained sequences, as numpy arrays."""
    allowed = np.tile(allow_all(vocab_size), (batch, 1))
    return FirstTokenConstraints(controls.default(batch, max_length), allowed)


def allow_all(vocab_size: int) -> np.ndarray:
    """Returns the mask that allows every token, int32 [ceil(V / 32)]."""
    return np.full(num_words(vocab_size), -1, np.int32)


def allowed_first(
    request: Request, matcher: grammar.Matcher | RulesMatcher | None, vocab_size: int
) -> np.ndarray:
    """Returns the mask of tokens that may begin a request's output, int32 [ceil(V / 32)].

    Args:
      matcher: Its matcher at the start of the output; None without grammar and rules.
    """
    mask = allow_all(vocab_size)
    if matcher is not None:
        matcher.fill(mask[None], ends=request.stop_ids, first_end=request.min_new_tokens)
    elif request.min_new_tokens:
        grammar.forbid(mask, request.stop_ids)
    return mask
