"""Loss of an unrolled drafter, which reads its own output from the second step on.

Step s at row i has read the tokens up to i + 1 + s and predicts the next one. The target's
distribution of that token comes from the target's row i + 1 + s.

Source: the training-time test of EAGLE-3, arXiv 2503.01840.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.config.train_schema import LossConfig
from dflash.drafters.parts.draft_vocabulary import DraftVocabulary
from dflash.layers import losses
from dflash.layers.losses import TrainBatch, Unembed

STEP_DECAY = 0.8  # Ratio of the weights of consecutive steps.


class StepScores(NamedTuple):
    """Scores of the predictions of S steps at every row of a batch.

    Attributes:
      objective: Loss to minimize, float32 [B, T, S].
      known: bool [B, T, S]; whether the token to predict is in the draft vocabulary.
      correct: bool [B, T, S]; whether the most probable token is the next one in the data.
    """

    objective: jax.Array
    known: jax.Array
    correct: jax.Array


def shift(rows: jax.Array, count: int) -> jax.Array:
    """Returns `rows` [B, T, ...] with row i + count at row i, and zeros outside [0, T)."""
    padding = [(0, 0)] * rows.ndim
    padding[1] = (max(-count, 0), max(count, 0))
    return jax.lax.slice_in_dim(
        jnp.pad(rows, padding), max(count, 0), max(count, 0) + rows.shape[1], axis=1
    )


def counted_steps(batch: TrainBatch, steps: int) -> jax.Array:
    """Returns a mask bool [B, T, S] of the predictions that count in the loss.

    Step s at row i counts if it predicts a supervised token of the row's document.
    """
    documents = batch.segment_ids
    inside = [
        (shift(documents, s + 2) == documents) & (shift(batch.loss_mask, s + 2) != 0)
        for s in range(steps)
    ]
    return jnp.stack(inside, axis=-1) & (documents != 0)[..., None]


def score_steps(
    hidden: list[jax.Array],
    batch: TrainBatch,
    vocabulary: DraftVocabulary,
    draft_logits: Callable[[jax.Array], jax.Array],
    unembed: Unembed,
    options: LossConfig,
) -> StepScores:
    """Scores the predictions of S steps against the target's distribution, the data, or both.

    The target's distribution is restricted to the draft vocabulary and renormalized. Its
    cross-entropy with the prediction differs from the KL divergence by a constant.

    Args:
      hidden: Outputs of the steps, S arrays [B, T, D].
      batch: Packed rows, with the target's hidden states if the loss uses them.
      draft_logits: Function [..., D] -> logits float32 [..., Q] of the drafter.
      unembed: Output head of the target, [B, m, D] -> logits float32 [B, m, V].
    Raises:
      ConfigError: The loss is only for block drafters.
      ValueError: The loss uses the target's hidden states, and the batch has none.
    """
    if options.name not in ("kl", "cross_entropy"):
        raise errors.ConfigError(
            f"loss.name: {options.name!r} is only for block drafters; expected kl or cross_entropy"
        )
    soft = options.kl_weight if options.uses_target_hidden else 0.0
    if soft and batch.hidden is None:
        raise ValueError(f"loss {options.name!r}: the batch lacks the target's hidden states")
    # Align the steps that predict the same token, since they share a row of the target.
    aligned = jnp.stack([shift(h, -(s + 1)) for s, h in enumerate(hidden)], axis=2)
    labels = vocabulary.draft_ids[shift(batch.tokens, 1)]
    tempered = functools.partial(losses.at_temperature, options.temperature)

    def score(students, labels, teachers):
        logits = tempered(draft_logits)(students)  # [B, m, S, Q]
        return _score_rows(logits, labels, teachers, vocabulary, tempered(unembed), soft)

    rows = (aligned, labels, batch.hidden if soft else None)
    scores = losses.in_chunks(score, rows, options.chunk_tokens)

    def part(array):
        return jnp.stack([shift(array[..., s], s + 1) for s in range(len(hidden))], axis=-1)

    return jax.tree.map(part, scores)


def unrolled_loss(
    scores: StepScores, counted: jax.Array, options: LossConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the weighted loss of all steps.

    Args:
      scores: Scores of the predictions, each [B, T, S].
      counted: Predictions that count, bool [B, T, S]; see `counted_steps`.
      options: Config group of the loss; `gamma` sets the weights of steps, by default powers of
        `STEP_DECAY`.
    Returns:
      loss float32 [], and metrics, each float32 []: "token_accuracy", over all predictions that
      count; "weight", the number of rows whose first prediction counts, which is the divisor of
      the loss.
    """
    steps = counted.shape[-1]
    if options.gamma is None:
        weights = STEP_DECAY ** np.arange(steps, dtype=np.float32)
    else:
        weights = losses.decay_weights(steps, options.gamma)
    rows = jnp.maximum(counted[..., 0].sum(dtype=jnp.float32), 1)
    loss = jnp.sum(weights * jnp.where(counted & scores.known, scores.objective, 0)) / rows
    metrics = {
        "token_accuracy": losses.mean_over(scores.correct, counted),
        "weight": rows,
    }
    return loss, metrics


def _score_rows(logits, labels, teachers, vocabulary, unembed, soft) -> StepScores:
    """Returns the scores [B, m, S] of logits [B, m, S, Q], where S steps predict m tokens."""
    log_probs = jax.nn.log_softmax(logits)
    size = logits.shape[-1]
    known_label = (labels < size)[..., None]
    correct = known_label & (jnp.argmax(logits, axis=-1) == labels[..., None])
    objective = jnp.zeros(correct.shape, jnp.float32)
    if soft < 1:
        is_label = jnp.arange(size) == labels[..., None, None]
        objective = (1 - soft) * -jnp.sum(jnp.where(is_label, log_probs, 0), axis=-1)
    if not soft:
        return StepScores(objective, jnp.broadcast_to(known_label, correct.shape), correct)
    target = jax.lax.stop_gradient(unembed(teachers))
    known = vocabulary.draft_ids[jnp.argmax(target, axis=-1)] < size
    teacher = jax.nn.softmax(jnp.take(target, vocabulary.target_ids, axis=-1))
    cross = -jnp.sum(teacher[..., None, :] * log_probs, axis=-1)
    return StepScores(
        objective + soft * cross, jnp.broadcast_to(known[..., None], cross.shape), correct
    )
