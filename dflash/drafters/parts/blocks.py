"""Training of block drafters: anchors, labels, scores and loss of the blocks.

Source: arXiv 2602.06036.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash import errors
from dflash.config.train_schema import CANDIDATE_KL, LossConfig
from dflash.layers import losses
from dflash.layers.losses import TokenScores, TrainBatch, Unembed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Anchors:
    """First rows of the A blocks of each sequence.

    Attributes:
      index: Row of the anchor, int32 [B, A], in [0, T); 0 if not valid.
      valid: bool [B, A]; False for the padding of sequences with fewer than A anchors.
    """

    index: jax.Array
    valid: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of R = G + 1 rows: the anchor's token, then G mask tokens.

    Attributes:
      tokens: Input tokens, int32 [B, A, R]; only mask tokens in invalid blocks.
      positions: Positions for rotary embedding, int32 [B, A, R].
      labels: True tokens at draft positions 1 … G, int32 [B, A, G].
      counted: Draft positions that count in the loss, bool [B, A, G]: those within the anchor's
        document whose tokens are supervised.
    """

    anchors: Anchors
    tokens: jax.Array
    positions: jax.Array
    labels: jax.Array
    counted: jax.Array


def sample_anchors(batch: TrainBatch, count: int, key: jax.Array) -> Anchors:
    """Draws anchors uniformly and without replacement, of tokens whose successor is supervised.

    Args:
      count: Maximum number of anchors per sequence. The number A is at most one less than the
        length of a row, whose last token has no successor.
    Returns:
      Anchors in ascending order, with invalid ones last.
    """
    length = batch.tokens.shape[1]
    documents = batch.segment_ids[:, :-1]
    eligible = (batch.loss_mask[:, 1:] != 0) & (documents == batch.segment_ids[:, 1:])
    eligible &= documents != 0
    # Draw for whole rows, so that the result does not depend on how rows are split over devices.
    priority = jax.random.uniform(key, batch.tokens.shape)[:, :-1]
    order = jnp.argsort(jnp.where(eligible, priority, 2.0), axis=1)[:, :count]
    chosen = jnp.where(jnp.take_along_axis(eligible, order, axis=1), order, length)
    chosen = jnp.sort(chosen, axis=1)
    valid = chosen < length
    return Anchors(jnp.where(valid, chosen, 0).astype(jnp.int32), valid)


def rows_before(batch: TrainBatch, anchors: Anchors) -> tuple[jax.Array, jax.Array]:
    """Returns the row before each anchor, int32 [B, A], and whether it is in the same document."""
    before = jnp.maximum(anchors.index - 1, 0)
    ends = before, anchors.index
    documents = (jnp.take_along_axis(batch.segment_ids, row, axis=1) for row in ends)
    return before, jnp.equal(*documents) & (anchors.index > 0)


def cut_blocks(
    batch: TrainBatch, anchors: Anchors, *, block_size: int, mask_token_id: int
) -> Blocks:
    """Cuts the blocks that begin at `anchors` out of packed rows."""
    rows = jnp.arange(block_size)
    index = anchors.index[..., None] + rows  # [B, A, R]
    inside = index < batch.tokens.shape[1]

    def look_up(array, index):
        flat = index.reshape(index.shape[0], -1)
        return jnp.take_along_axis(array, flat, axis=1, mode="clip").reshape(index.shape)

    documents = look_up(batch.segment_ids, index)
    counted = inside & (documents == documents[..., :1]) & (documents != 0)
    counted &= (look_up(batch.loss_mask, index) != 0) & anchors.valid[..., None]
    tokens = look_up(batch.tokens, index)
    first = anchors.valid[..., None] & (rows == 0)
    start = look_up(batch.positions, anchors.index[..., None])
    return Blocks(
        anchors=anchors,
        tokens=jnp.where(first, tokens, mask_token_id),
        positions=start + rows,
        labels=tokens[..., 1:],
        counted=counted[..., 1:],
    )


def score_blocks(
    hidden: jax.Array,
    blocks: Blocks,
    batch: TrainBatch,
    unembed: Unembed,
    options: LossConfig,
    *,
    frozen_head: bool = True,
) -> TokenScores:
    """Scores draft positions 1 … G of all blocks, each score [B, A, G].

    Args:
      hidden: Hidden states of the draft positions after the drafter's final norm, [B, A, G, D].
      batch: Packed rows, with the target's hidden states if the loss uses them.
      unembed: Function [B, m, D] -> logits float32 [B, m, V].
      frozen_head: Whether `unembed` has no parameters to train.
    Raises:
      ConfigError: The loss is for drafters that choose among likely tokens.
      ValueError: The loss uses the target's hidden states, and the batch has none.
    """
    if options.name == CANDIDATE_KL:
        raise errors.ConfigError(
            f"loss.name: {CANDIDATE_KL!r} is only for dflash2 and ubtree, which choose among "
            "likely tokens; use kl"
        )
    rows, _, _, width = hidden.shape
    shape = blocks.labels.shape
    target_hidden = target_rows(batch, blocks, options) if options.uses_target_hidden else None
    scores = losses.score_tokens(
        hidden.reshape(rows, -1, width),
        blocks.labels.reshape(rows, -1),
        losses.at_temperature(options.temperature, unembed),
        target_hidden=target_hidden,
        kl_weight=options.kl_weight if options.uses_target_hidden else 0.0,
        frozen_head=frozen_head,
        chunk_tokens=options.chunk_tokens,
    )
    return jax.tree.map(lambda score: score.reshape(shape), scores)


def target_rows(batch: TrainBatch, blocks: Blocks, options: LossConfig) -> jax.Array:
    """Returns the target's hidden states that predict the labels of all blocks, [B, A · G, D].

    Raises:
      ValueError: The batch has none.
    """
    if batch.hidden is None:
        raise ValueError(f"loss {options.name!r}: the batch lacks the target's hidden states")
    # Row t of the target predicts token t + 1.
    index = blocks.anchors.index[..., None] + jnp.arange(blocks.labels.shape[-1])
    index = index.reshape(index.shape[0], -1, 1)
    return jnp.take_along_axis(batch.hidden, index, axis=1, mode="clip")


def block_loss(
    scores: TokenScores, blocks: Blocks, options: LossConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the weighted loss of all blocks.

    Args:
      scores: Scores of the draft positions, each [B, A, G].
      options: Config group of the loss, which sets the weights of draft positions.
    Returns:
      loss float32 [], and metrics, each float32 []: "loss"; "token_loss", the
      weighted mean of the objective over draft positions; "token_accuracy", over all counted draft
      positions; "blocks", the number of valid blocks; "weight", the divisor of the loss.
    """
    weights, divisor = losses.block_weights(scores.nll, blocks.counted, options)
    loss = jnp.sum(weights * scores.objective) / divisor
    metrics = {
        "loss": loss,
        "token_loss": losses.mean_over(scores.objective, weights),
        "token_accuracy": losses.mean_over(scores.correct, blocks.counted),
        "blocks": blocks.anchors.valid.sum(dtype=jnp.float32),
        "weight": divisor,
    }
    return loss, metrics
