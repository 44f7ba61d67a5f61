"""Logit controls: biases, penalties and masks, applied before a token is sampled.

The logits of a row, which depend on the committed tokens and on the drafts on the path to the row,
go through these steps. The order is vLLM's (v1/sample/sampler.py) up to the penalties, and that of
Hugging Face's generation for the filters.

    1. logit_bias is added.
    2. repetition_penalty r, for tokens of prompt, output or path: l / r if l > 0, else l * r
       (Keskar et al. 2019, arXiv 1909.05858).
    3. frequency_penalty times the token's count in output and path is subtracted, then
       presence_penalty if that count is not 0 (OpenAI's definition).
    4. Stop tokens before min_new_tokens, and tokens that a mask does not allow, become -inf; masks
       are those of grammars, allowed tokens and bad words.
    5. Temperature, top-k, top-p, min-p (`inference/logits/sampling.py`); a greedy sequence takes
       the largest logit after step 4.

Drafts count as output in the rows after them, so every row of a block is shaped as plain decoding
would shape it. A batch in which no sequence uses a control skips all steps up to 4.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash.inference.request import MAX_BIASED, Request
from dflash.parallel.sharding import Sharding

_NO_TOKEN = -1  # Pads the biased tokens.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """Logit controls of B sequences.

    Attributes:
      presence: float32 [B]; presence penalty.
      frequency: float32 [B]; frequency penalty.
      repetition: float32 [B]; repetition penalty, 1 is off.
      bias_ids: int32 [B, MAX_BIASED]; biased tokens, padded with -1.
      biases: float32 [B, MAX_BIASED]; bias of each of `bias_ids`.
      min_length: int32 [B]; length of prompt and output before which no stop token is drawn.
      prompt_length: int32 [B]; number of prompt tokens.
      constrained: bool [B]; whether the tokens that may follow are masked.
      logprobs: bool [B]; whether log-probabilities are reported.
      token_ids: int32 [B, L]; committed tokens; valid only for sequences with controls.
    """

    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    bias_ids: jax.Array
    biases: jax.Array
    min_length: jax.Array
    prompt_length: jax.Array
    constrained: jax.Array
    logprobs: jax.Array
    token_ids: jax.Array

    def with_tokens(self, start: jax.Array, tokens: jax.Array, count: jax.Array) -> "Controls":
        """Writes committed tokens to `token_ids`.

        Args:
          start: int32 [B]; position of the first token.
          tokens: int32 [B, T].
          count: int32 [B]; number of tokens to write.
        """
        offset = jnp.arange(tokens.shape[1])

        def put(row, start, tokens, count):
            places = jnp.where(offset < count, start + offset, row.shape[0])
            return row.at[places].set(tokens, mode="drop")

        token_ids = jax.vmap(put)(self.token_ids, start, tokens, count)
        return dataclasses.replace(self, token_ids=token_ids)

    def shapes(self, length: jax.Array, active: jax.Array) -> jax.Array:
        """Returns whether the logits of any active sequence are changed, bool []."""
        penalized = (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)
        biased = self.bias_ids[:, 0] != _NO_TOKEN
        # Two separate conditions, so that XLA can fold the first one if `min_length` is constant 0.
        too_short = (self.min_length > 0) & (length < self.min_length)
        return jnp.any(active & (penalized | biased | too_short))


def shape_logits(
    logits: jax.Array,
    controls: Controls,
    length: jax.Array,
    stop_ids: jax.Array,
    drafts: jax.Array,
    ancestry: jax.Array | None = None,
    allowed: jax.Array | None = None,
) -> jax.Array:
    """Applies steps 1 to 4 to logits, and returns them, float32 [B, R, V].

    Args:
      logits: float32 [B, R, V]; the target's logits after each row.
      length: int32 [B]; committed tokens, the anchor included.
      stop_ids: int32 [B, E]; tokens that end each sequence, padded with -1.
      drafts: int32 [B, R - 1]; tokens of the rows after the anchor's.
      ancestry: bool [B, R, R]; see `tree.Tree`. None for a chain.
      allowed: int32 [B, R, ceil(V / 32)] or None; token v may follow if bit v % 32 of word v // 32
        is set.
    """
    rows, vocab_size = logits.shape[1:]
    if ancestry is None:
        ancestry = jnp.tri(rows, dtype=bool)[None]
    on_path = ancestry[:, :, 1:]
    logits += _scatter(controls.bias_ids, controls.biases, vocab_size)[:, None]

    position = jnp.arange(controls.token_ids.shape[1])
    committed = position < length[:, None]
    output = committed & (position >= controls.prompt_length[:, None])
    drafted = _count_drafts(drafts, on_path, vocab_size)
    counts = _scatter(controls.token_ids, output.astype(jnp.float32), vocab_size)[:, None] + drafted
    seen = (
        _scatter(controls.token_ids, committed.astype(jnp.float32), vocab_size)[:, None] + drafted
    )
    repetition = controls.repetition[:, None, None]
    penalized = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, penalized, logits)
    logits -= controls.frequency[:, None, None] * counts
    logits -= controls.presence[:, None, None] * (counts > 0)

    too_short = length[:, None] + on_path.sum(axis=-1) < controls.min_length[:, None]
    ends = _scatter(stop_ids, jnp.ones(stop_ids.shape), vocab_size)[:, None] > 0
    logits = jnp.where(too_short[..., None] & ends, -jnp.inf, logits)
    return logits if allowed is None else jnp.where(_bits(allowed, vocab_size), logits, -jnp.inf)


def _scatter(ids: jax.Array, values: jax.Array, vocab_size: int) -> jax.Array:
    """Sums the values [B, T] of each id, float32 [B, V]; negative ids are ignored."""

    def sums(ids, values):
        places = jnp.where(ids < 0, vocab_size, ids)
        return jnp.zeros(vocab_size, jnp.float32).at[places].add(values, mode="drop")

    return jax.vmap(sums)(ids, values)


def _count_drafts(drafts: jax.Array, on_path: jax.Array, vocab_size: int) -> jax.Array:
    """Counts how often each token was drafted on the path to each row, float32 [B, R, V].

    Args:
      drafts: int32 [B, G].
      on_path: bool [B or 1, R, G]; whether a draft is on the path to a row.
    """
    tokens = jax.nn.one_hot(drafts, vocab_size, dtype=jnp.float32)
    paths = jnp.broadcast_to(on_path, (drafts.shape[0], *on_path.shape[1:]))
    # Sums of ones are exact at any matmul precision.
    return jnp.einsum("brg,bgv->brv", paths.astype(jnp.float32), tokens)


def _bits(words: jax.Array, count: int) -> jax.Array:
    """Unpacks the first `count` bits of words int32 [..., W], as bool [..., count]."""
    bits = (words[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :count] != 0


# --- on the host ---------------------------------------------------------------------------------


def abstract(batch: int, name: str | None, max_length: int, sharding: Sharding) -> Controls:
    """Returns abstract controls.

    Args:
      name: Logical axis of the batch; None replicates it.
      max_length: Length L of the longest sequence, in tokens.
    """

    def array(row):
        return sharding.abstract((batch, *row.shape), (name, *[None] * row.ndim), row.dtype)

    return jax.tree.map(array, _default_row(max_length))


def default(batch: int, max_length: int) -> Controls:
    """Returns the controls of `batch` sequences that use none, as numpy arrays."""
    rows = _default_row(max_length)
    return jax.tree.map(lambda row: np.broadcast_to(row, (batch, *row.shape)), rows)


def _default_row(max_length: int) -> Controls:
    return of_request(Request(0, (), 1), (), max_length)


def is_default(request: Request) -> bool:
    """Returns whether a request uses no control and requests no log-probabilities."""
    sampling = request.sampling
    penalties = sampling.presence_penalty, sampling.frequency_penalty, request.min_new_tokens
    return (
        not any(penalties)
        and sampling.repetition_penalty == 1
        and not sampling.logit_bias
        and request.logprobs is None
        and not request.is_masked
    )


def is_greedy(request: Request) -> bool:
    """Returns whether the output is the likeliest tokens, and nothing but tokens is reported."""
    return request.sampling.temperature == 0 and is_default(request)


def of_request(request: Request, output_ids: Sequence[int], max_length: int) -> Controls:
    """Returns the controls of a request, as numpy arrays without a batch axis.

    The masks of a grammar also determine where the output may end, so `min_length` is 0 for
    constrained sequences.

    Args:
      output_ids: Output so far.
      max_length: Length L of the longest sequence, in tokens.
    """
    sampling = request.sampling
    bias_ids = np.full(MAX_BIASED, _NO_TOKEN, np.int32)
    biases = np.zeros(MAX_BIASED, np.float32)
    for place, (token, bias) in enumerate(sampling.logit_bias):
        bias_ids[place], biases[place] = token, bias
    token_ids = np.zeros(max_length, np.int32)
    tokens = (*request.prompt, *output_ids)
    token_ids[: len(tokens)] = tokens
    constrained = request.is_masked
    shortest = 0 if constrained else len(request.prompt) + request.min_new_tokens
    return Controls(
        presence=np.float32(sampling.presence_penalty),
        frequency=np.float32(sampling.frequency_penalty),
        repetition=np.float32(sampling.repetition_penalty),
        bias_ids=bias_ids,
        biases=biases,
        min_length=np.int32(shortest),
        prompt_length=np.int32(len(request.prompt)),
        constrained=np.bool_(constrained),
        logprobs=np.bool_(request.logprobs is not None),
        token_ids=token_ids,
    )
