"""Training a drafter that feeds on its own output: steps unrolled over whole rows, and their loss.

Step s at row i has seen the tokens up to i + 1 + s and predicts the one after. The target's own
distribution of that token comes from its row i + 1 + s.

Source: the training-time test of EAGLE-3, arXiv 2503.01840.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.config.loss_schema import LossConfig
from dflash.drafters.parts.draft_vocabulary import DraftVocabulary
from dflash.layers import losses
from dflash.layers.losses import Unembed
from dflash.layers.train_batch import TrainBatch

STEP_DECAY = 0.8  # a step's weight is that of the one before, times this


class StepScores(NamedTuple):
    """Scores of each prediction; rows as in the batch, S steps.

    Attributes:
      objective: float32 [B, T, S]; to be minimized.
      known: bool [B, T, S]; the token to be predicted is in the draft vocabulary.
      correct: bool [B, T, S]; the most probable token is the one that follows in the data.
    """

    objective: jax.Array
    known: jax.Array
    correct: jax.Array


def shift(rows: jax.Array, count: int) -> jax.Array:
    """rows[:, i + count] at row i of [B, T, ...], for counts of either sign; zeros come in."""
    padding = [(0, 0)] * rows.ndim
    padding[1] = (max(-count, 0), max(count, 0))
    return jax.lax.slice_in_dim(
        jnp.pad(rows, padding), max(count, 0), max(count, 0) + rows.shape[1], axis=1
    )


def counted_steps(batch: TrainBatch, steps: int) -> jax.Array:
    """bool [B, T, S]; step s at row i predicts a supervised token of the row's document."""
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
    """Compares what S steps predict with the target's distribution, or with the data.

    The target's is restricted to the draft vocabulary and renormalised; the objective is then the
    cross-entropy of the two, which differs from the divergence by a constant.

    Args:
      hidden: S arrays [B, T, D].
      batch: holds the target's hidden states if the loss asks for them.
      vocabulary: of the drafter.
      draft_logits: [..., D] -> float32 [..., Q].
      unembed: the target's, [B, m, D] -> float32 logits [B, m, V].
      options: of the loss.
    Raises:
      ConfigError: the loss is for drafters of blocks only.
      ValueError: the loss asks for the target's hidden states, and the batch has none.
    """
    if options.name == "dpace":
        raise errors.ConfigError(
            "loss.name: 'dpace' is for drafters of blocks; this one takes kl or cross_entropy"
        )
    soft = options.kl_weight if options.uses_target_hidden else 0.0
    if soft and batch.hidden is None:
        raise ValueError(f"loss {options.name!r}: the batch lacks the target's hidden states")
    # Align all steps that predict the same token at the row before it: they share one teacher.
    aligned = jnp.stack([shift(h, -(s + 1)) for s, h in enumerate(hidden)], axis=2)
    labels = vocabulary.draft_ids[shift(batch.tokens, 1)]

    def score(students, labels, teachers):
        logits = draft_logits(students)  # [B, m, S, Q]
        return _score_rows(logits, labels, teachers, vocabulary, unembed, soft)

    rows = (aligned, labels, batch.hidden if soft else None)
    scores = losses.in_chunks(score, rows, options.chunk_tokens)

    def part(array):
        return jnp.stack([shift(array[..., s], s + 1) for s in range(len(hidden))], axis=-1)

    return jax.tree.map(part, scores)


def unrolled_loss(
    scores: StepScores, counted: jax.Array, options: LossConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted loss of all steps.

    Args:
      scores: [B, T, S] each.
      counted: bool [B, T, S]; see `counted_steps`.
      options: how steps are weighted; by default as `STEP_DECAY` says.
    Returns:
      loss float32 [], and metrics, each float32 []: "acceptance_length", tokens that a cycle would
      commit, the mean over rows whose first prediction counts; "token_accuracy", over all
      predictions that count; "weight", the number of those rows, which every step is divided by.
    """
    steps = counted.shape[-1]
    if options.gamma is None:
        weights = STEP_DECAY ** np.arange(steps, dtype=np.float32)
    else:
        weights = losses.decay_weights(steps, options.gamma)
    starts = counted[..., 0]
    rows = jnp.maximum(starts.sum(dtype=jnp.float32), 1)
    loss = jnp.sum(weights * jnp.where(counted & scores.known, scores.objective, 0)) / rows
    lengths = losses.acceptance_lengths(scores.correct, counted)
    metrics = {
        "acceptance_length": losses.mean_over(lengths, starts),
        "token_accuracy": losses.mean_over(scores.correct, counted),
        "weight": rows,
    }
    return loss, metrics


def _score_rows(logits, labels, teachers, vocabulary, unembed, soft) -> StepScores:
    """Logits [B, m, S, Q] of the same m tokens by S steps."""
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
