"""Losses over a vocabulary, computed in chunks so that [rows, V] logits never exist in full.

Logits are reduced along the vocabulary by sums, maxima and comparisons only, so a vocabulary that
is sharded over devices stays sharded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from dflash.config.train_schema import LossConfig

# Positions of each sequence per chunk.
CHUNK_TOKENS = 128

# Block sizes of the DFlash paper, and the gamma that it trains each with.
_PAPER_BLOCK_SIZES, _PAPER_GAMMAS = (8, 10, 16), (4.0, 5.0, 7.0)

# Logit of tokens that are not among the likely ones. Unlike -inf, it has gradients of zero.
_UNLIKELY = -1e30
_SAVED = "saved"  # Name of the few values that the backward pass of `in_chunks` keeps.

Unembed = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Packed rows of T tokens, with the target's outputs for them.

    Attributes:
      tokens: int32 [B, T].
      positions: int32 [B, T]; for rotary embedding, counted within each document.
      segment_ids: int32 [B, T]; tokens of one document share an id. 0 is padding.
      loss_mask: [B, T]; nonzero where the token is a training target.
      features: [B, T, C·D]; target features, for drafters that read them.
      hidden: [B, T, D]; hidden states of the target after its final norm, for losses on its
        distribution. Row t predicts token t + 1.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    loss_mask: jax.Array
    features: jax.Array | None = None
    hidden: jax.Array | None = None


class TokenScores(NamedTuple):
    """Scores of each predicted token.

    Attributes:
      objective: float32 [B, M]; loss to minimize. With a frozen head, only it has gradients.
      nll: float32 [B, M]; -log of the label's probability.
      correct: bool [B, M]; the label is the most probable token, with ties going to the lowest id.
    """

    objective: jax.Array
    nll: jax.Array
    correct: jax.Array


def score_tokens(
    hidden: jax.Array,
    labels: jax.Array,
    unembed: Unembed,
    *,
    target_hidden: jax.Array | None = None,
    kl_weight: float = 0.0,
    frozen_head: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenScores:
    """Scores the predictions of hidden states against labels and, optionally, the target's logits.

    The objective is (1 - kl_weight) · nll + kl_weight · KL(target ‖ drafter).

    Args:
      hidden: [B, M, D]; hidden states after the final norm.
      labels: int32 [B, M].
      unembed: Function from hidden states [B, m, D] to float32 logits [B, m, V].
      target_hidden: [B, M, D]; hidden states of the target; they receive no gradient.
      kl_weight: Weight of the divergence in the objective, in [0, 1].
      frozen_head: No parameter of `unembed` is trained. Each row's gradient is then computed
        together with its loss, so that no logits are computed twice.
      chunk_tokens: Positions of each sequence per chunk.
    Raises:
      ValueError: `kl_weight` is not 0 and `target_hidden` is missing.
    """
    if kl_weight and target_hidden is None:
        raise ValueError("score_tokens: kl_weight > 0 requires target_hidden")
    length = labels.shape[1]
    chunks = -(-length // chunk_tokens)
    rows = (hidden, labels, target_hidden if kl_weight else None)

    def score(hidden, labels, target_hidden):
        return _score_chunk(hidden, labels, target_hidden, unembed, kl_weight)

    if frozen_head:
        results = jax.lax.map(lambda arrays: _score_and_pull(score, *arrays), _split(rows, chunks))
        scores, gradients = _join(results, length)
        return scores._replace(objective=_with_gradients(scores.objective, hidden, gradients))
    return in_chunks(score, rows, chunk_tokens)


def score_likely(
    base: jax.Array,
    corrected: jax.Array,
    target: jax.Array,
    labels: jax.Array,
    options: LossConfig,
) -> TokenScores:
    """Scores corrected logits by the target's distribution among the likely tokens.

    The objective is KL(target ‖ corrected), of distributions among the `num_candidates` tokens with
    the largest base logits, plus `base_weight` times the cross-entropy of the base logits.

    Args:
      base: Base logits, float32 [..., V].
      corrected: Corrected logits, float32 [..., V].
      target: Logits of the target, float32 [..., V]; they receive no gradient.
      labels: int32 [...]; V for tokens that cannot be drafted, which have no cross-entropy.
      options: Config group of the loss.
    Returns:
      Scores; `nll` is that of the base logits, and a label is `correct` if it has the largest
      corrected logit of the likely tokens.
    Source: arXiv 2609.39972.
    """
    size = base.shape[-1]
    largest, _ = jax.lax.top_k(jax.lax.stop_gradient(base), min(options.num_candidates, size))
    likely = base >= checkpoint_name(largest[..., -1:], _SAVED)
    target, corrected = (
        jnp.where(likely, x, _UNLIKELY) for x in (jax.lax.stop_gradient(target), corrected)
    )
    wanted, found = (jax.nn.log_softmax(x / options.temperature) for x in (target, corrected))
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
    is_label = jnp.arange(size) == labels[..., None]

    def of_label(x):
        return jnp.sum(jnp.where(is_label, x, 0), axis=-1)

    cost = jax.nn.logsumexp(base, axis=-1) - of_label(base)
    known = labels < size
    objective = divergence + options.base_weight * jnp.where(known, cost, 0)
    correct = known & (of_label(corrected) == corrected.max(axis=-1))
    return TokenScores(objective, jnp.where(known, cost, jnp.inf), correct)


def at_temperature(temperature: float, unembed: Unembed) -> Unembed:
    """Returns an output head whose logits are divided by a temperature."""
    if temperature == 1.0:
        return unembed
    return lambda hidden: unembed(hidden) / temperature


def in_chunks(function: Callable, rows: tuple, chunk_tokens: int = CHUNK_TOKENS) -> Any:
    """Computes function(*rows) in chunks of the second dimension; the backward pass recomputes it.

    It keeps only what `checkpoint_name` names `_SAVED`.

    Args:
      function: Row-wise function from arrays [B, m, ...] to a pytree of arrays [B, m, ...].
      rows: Arguments of `function`: arrays [B, M, ...] or None.
      chunk_tokens: Largest chunk size m.
    """
    length = rows[0].shape[1]
    chunks = _split(rows, -(-length // chunk_tokens))
    policy = jax.checkpoint_policies.save_only_these_names(_SAVED)
    recomputed = jax.checkpoint(function, policy=policy)
    return _join(jax.lax.map(lambda arrays: recomputed(*arrays), chunks), length)


def mean_over(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the weighted mean, float32 []; 0 if all weights are 0."""
    total = weights.sum(dtype=jnp.float32)
    return jnp.sum(values * weights, dtype=jnp.float32) / jnp.where(total == 0, 1, total)


def block_weights(
    nll: jax.Array, counted: jax.Array, options: LossConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the weight of each draft position in the loss, and the divisor of the weighted sum.

    Args:
      nll: float32 [B, A, G]; negative log-likelihood at draft positions 1 … G of each block.
      counted: bool [B, A, G]; draft positions with a label.
    Returns:
      Weights float32 [B, A, G], without gradient, and a divisor float32 [].
    """
    if options.name == "dpace":
        return dpace_weights(nll, counted, options.alpha), jnp.float32(nll.shape[0])
    gamma = derived_gamma(nll.shape[-1] + 1) if options.gamma is None else options.gamma
    weights = counted * decay_weights(nll.shape[-1], gamma)
    total = weights.sum()
    return weights, jnp.where(total == 0, 1, total)


def decay_weights(num_draft_tokens: int, gamma: float) -> np.ndarray:
    """Returns float32 exp(-(k - 1) / gamma) for draft positions k = 1, 2, …; ones if gamma is 0.

    Source: arXiv 2602.06036.
    """
    steps = np.arange(num_draft_tokens)
    return np.exp(-steps / gamma if gamma else 0.0 * steps).astype(np.float32)


def derived_gamma(block_size: int) -> float:
    """Returns the gamma for a block size: 4, 5 and 7 for 8, 10 and 16, linear between and beyond.

    Source: arXiv 2602.06036.
    """
    sizes, gammas = _PAPER_BLOCK_SIZES, _PAPER_GAMMAS
    if block_size < sizes[0]:
        return gammas[0] * block_size / sizes[0]
    per_row = (gammas[-1] - gammas[-2]) / (sizes[-1] - sizes[-2])
    return float(np.interp(block_size, sizes, gammas) + per_row * max(block_size - sizes[-1], 0))


def dpace_weights(nll: jax.Array, counted: jax.Array, alpha: float) -> jax.Array:
    """Weights each draft position by the expected number of accepted positions from it on.

    With p = exp(-nll), position k is accepted with probability q_k = (1 - alpha) p_k + alpha, and
    all positions up to k with probability C_k = q_1 · … · q_k. Position k has weight
    Σ_{m ≥ k} C_m. Positions without a label count as accepted and have weight 0.

    Args:
      nll: float32 [..., G]; negative log-likelihoods of the labels.
      counted: bool [..., G]; draft positions with a label.
      alpha: Lower bound of q, in [0, 1].
    Returns:
      float32 [..., G], without gradient.
    Source: arXiv 2605.18810.
    """
    chance = (1 - alpha) * jnp.exp(-jax.lax.stop_gradient(nll)) + alpha
    reached = jnp.cumprod(jnp.where(counted, chance, 1.0), axis=-1) * counted
    return counted * jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)


def _score_chunk(hidden, labels, target_hidden, unembed, kl_weight) -> TokenScores:
    logits = unembed(hidden)
    vocab = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    labels = labels[..., None]
    of_label = jnp.sum(jnp.where(vocab == labels, logits, 0), axis=-1)
    peak = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    total = jnp.sum(jnp.exp(logits - peak), axis=-1)
    nll = jnp.log(total) + peak[..., 0] - of_label
    # An argmax would gather a sharded vocabulary, so count tokens that would win a tie instead.
    rivals = (logits == peak) & (vocab < labels)
    # Sum in float32, like the other reductions, so that XLA reads the logits once for all of them.
    num_rivals = jnp.sum(rivals.astype(jnp.float32), axis=-1)
    correct = (of_label == peak[..., 0]) & (num_rivals == 0)
    objective = nll
    if kl_weight:
        target = jax.nn.log_softmax(jax.lax.stop_gradient(unembed(target_hidden)))
        log_probs = logits - peak - jnp.log(total)[..., None]
        divergence = jnp.sum(jnp.exp(target) * (target - log_probs), axis=-1)
        objective = (1 - kl_weight) * nll + kl_weight * divergence
    return TokenScores(objective, nll, correct)


def _score_and_pull(score, hidden, *arguments):
    """Returns scores, and the gradient of each row's objective by its hidden state [B, m, D].

    No gradient flows through either result.
    """

    def objective(hidden):
        scores = score(hidden, *arguments)
        return scores.objective, scores

    value, pull, scores = jax.vjp(objective, hidden, has_aux=True)
    (gradients,) = pull(jnp.ones_like(value))
    return jax.lax.stop_gradient((scores, gradients))


@jax.custom_vjp
def _with_gradients(objective, hidden, gradients):
    """Returns objectives [B, M] whose gradient by `hidden` is `gradients` [B, M, D]."""
    return objective


def _attach(objective, hidden, gradients):
    return objective, gradients


def _pull(gradients, cotangents):
    by_hidden = gradients.astype(jnp.float32) * cotangents[..., None]
    return None, by_hidden.astype(gradients.dtype), None


_with_gradients.defvjp(_attach, _pull)


def _split(arrays, chunks: int):
    """Splits arrays [B, M, ...] into chunks [chunks, B, m, ...], padded with zeros."""

    def split(array):
        length = array.shape[1]
        step = -(-length // chunks)
        padding = [(0, 0), (0, chunks * step - length)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, padding)
        return padded.reshape(array.shape[0], chunks, step, *array.shape[2:]).swapaxes(0, 1)

    return jax.tree.map(split, arrays)


def _join(arrays, length: int):
    """Reverses `_split`, cutting the second dimension to `length`."""

    def join(array):
        joined = array.swapaxes(0, 1)
        return joined.reshape(joined.shape[0], -1, *array.shape[3:])[:, :length]

    return jax.tree.map(join, arrays)
