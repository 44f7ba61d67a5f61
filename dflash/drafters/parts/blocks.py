"""Training a drafter of blocks: where blocks are anchored, what they predict, and their loss.

Source: arXiv 2602.06036.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.config.loss_schema import LossConfig
from dflash.layers import losses
from dflash.layers.losses import TokenScores, Unembed
from dflash.layers.train_batch import TrainBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Anchors:
    """Where the A blocks of each sequence begin.

    Attributes:
      index: int32 [B, A], in [0, T); 0 where not valid.
      valid: bool [B, A]; False fills up sequences with fewer places to begin.
    """

    index: jax.Array
    valid: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of R = G + 1 rows: the anchor's token, then G masks.

    Attributes:
      anchors: where they begin.
      tokens: int32 [B, A, R]; masks alone where the block is not valid.
      positions: int32 [B, A, R]; for rotary embedding.
      labels: int32 [B, A, G]; the true tokens at draft positions 1 … G.
      counted: bool [B, A, G]; False past the end of the anchor's document, and where the loss mask
        has a hole.
    """

    anchors: Anchors
    tokens: jax.Array
    positions: jax.Array
    labels: jax.Array
    counted: jax.Array


def sample_anchors(batch: TrainBatch, count: int, key: jax.Array) -> Anchors:
    """Draws anchors without replacement, evenly among tokens whose successor is supervised.

    Args:
      batch: packed rows.
      count: A, of each sequence.
      key: of the draw.
    Returns:
      anchors in ascending order, invalid ones last.
    """
    length = batch.tokens.shape[1]
    documents = batch.segment_ids[:, :-1]
    eligible = (batch.loss_mask[:, 1:] != 0) & (documents == batch.segment_ids[:, 1:])
    eligible &= documents != 0
    # Drawn for whole rows, so that the draw does not depend on how rows are split over devices.
    priority = jax.random.uniform(key, batch.tokens.shape)[:, :-1]
    order = jnp.argsort(jnp.where(eligible, priority, 2.0), axis=1)[:, :count]
    chosen = jnp.where(jnp.take_along_axis(eligible, order, axis=1), order, length)
    chosen = jnp.pad(chosen, ((0, 0), (0, count - chosen.shape[1])), constant_values=length)
    chosen = jnp.sort(chosen, axis=1)
    valid = chosen < length
    return Anchors(jnp.where(valid, chosen, 0).astype(jnp.int32), valid)


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
      hidden: [B, A, R, D]; the drafter's, after its final norm.
      blocks: the blocks that were drafted.
      batch: holds the target's hidden states if the loss asks for them.
      unembed: [B, m, D] -> float32 logits [B, m, V].
      options: of the loss.
      frozen_head: nothing inside `unembed` is trained.
    Raises:
      ValueError: the loss asks for the target's hidden states, and the batch has none.
    """
    rows, _, _, width = hidden.shape
    shape = blocks.labels.shape
    target_hidden = None
    if options.uses_target_hidden:
        if batch.hidden is None:
            raise ValueError(f"loss {options.name!r}: the batch lacks the target's hidden states")
        # The target's row t makes the distribution of token t + 1.
        index = blocks.anchors.index[..., None] + jnp.arange(shape[-1])
        index = index.reshape(rows, -1, 1)
        target_hidden = jnp.take_along_axis(batch.hidden, index, axis=1, mode="clip")
    scores = losses.score_tokens(
        hidden[:, :, 1:].reshape(rows, -1, width),
        blocks.labels.reshape(rows, -1),
        unembed,
        target_hidden=target_hidden,
        kl_weight=options.kl_weight if options.uses_target_hidden else 0.0,
        frozen_head=frozen_head,
        chunk_tokens=options.chunk_tokens,
    )
    return jax.tree.map(lambda score: score.reshape(shape), scores)


def block_loss(
    scores: TokenScores, blocks: Blocks, options: LossConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted loss of all blocks.

    Args:
      scores: [B, A, G] each.
      blocks: the blocks that were drafted.
      options: how draft positions are weighted.
    Returns:
      loss float32 [], and metrics, each float32 []: "loss"; "acceptance_length", tokens that a
      cycle would commit, the mean over valid blocks; "token_accuracy", over all counted draft
      positions; "blocks", the number of valid ones; "weight", what the loss is divided by.
    """
    weights, divisor = losses.block_weights(scores.nll, blocks.counted, options)
    loss = jnp.sum(weights * scores.objective) / divisor
    lengths = losses.acceptance_lengths(scores.correct, blocks.counted)
    metrics = {
        "loss": loss,
        "acceptance_length": losses.mean_over(lengths, blocks.anchors.valid),
        "token_accuracy": losses.mean_over(scores.correct, blocks.counted),
        "blocks": blocks.anchors.valid.sum(dtype=jnp.float32),
        "weight": divisor,
    }
    return loss, metrics
