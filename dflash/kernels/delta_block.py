"""Gated DeltaNet in block decoding: verification of a block of rows, and commit of accepted ones.

A verification goes from projected rows to gated outputs: convolution, activation, unit norms, gated
delta rule, output norm and gate. In plain JAX this takes dozens of small operations per layer, more
time than reading the state. The kernels do each half in one operation that reads a head's state
once, and the commit writes it in place.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash.kernels import delta_block_tpu as tpu
from dflash.kernels import gated_delta
from dflash.kernels import implementation as implementations
from dflash.kernels.gated_delta import Block, causal_conv, last_rows
from dflash.kernels.split_heads import rms_norm


class Heads(NamedTuple):
    """Projected rows of the heads, with what turns them into inputs and outputs of the delta rule.

    Attributes:
      rows: [B, T, 2 · K · dk + 2 · V · dv]; queries, keys, values and output gates, before the
        convolution and activations.
      log_decay: float32 [B, T, V]; g, at most 0.
      beta: float32 [B, T, V]; rates in [0, 1].
      conv: [C, W]; weights of the convolution of queries, keys and values, C channels.
      scale: [dv]; scale of the output norm.
    """

    rows: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    conv: jax.Array
    scale: jax.Array


def verify_block(
    heads: Heads,
    memory: jax.Array,
    before: jax.Array,
    ancestry: jax.Array | None = None,
    *,
    eps: float,
    implementation: str = "auto",
) -> tuple[jax.Array, Block]:
    """Computes the gated outputs of a block of rows, without changing the state.

    Args:
      memory: float32 [B, V, dk, dv]; state before the block.
      before: [B, W - 1, C]; rows before the block that the convolution reads, the latest last.
      ancestry: bool [B, T, T]; see `gated_delta.solve_block`. None is a chain.
    Returns:
      Outputs [B, T, V · dv] in the dtype of the rows, and the block.
    Raises:
      ValueError: The columns of the rows do not fit the channels.
    """
    values = memory.shape[1] * memory.shape[3]
    if heads.rows.shape[-1] != heads.conv.shape[0] + values:
        raise ValueError(
            f"delta_block: rows {heads.rows.shape} do not fit {heads.conv.shape[0]} channels of a "
            f"convolution and {memory.shape[1]} gates of {memory.shape[3]}"
        )
    outputs, *block = implementations.run(
        implementation,
        *heads,
        memory,
        before,
        ancestry,
        reference=functools.partial(_verify, eps=eps),
        pallas=functools.partial(tpu.verify_block_tpu, eps=eps),
        unsupported=tpu.unsupported(heads.rows, memory),
    )
    return outputs, Block(*block)


def commit_block(
    memory: jax.Array,
    before: jax.Array,
    block: Block,
    rows: jax.Array,
    count: jax.Array,
    path: jax.Array | None = None,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Returns the state after the accepted rows of a block, and the last rows before the next one.

    The other arguments are those of `gated_delta.advance`.

    Args:
      before: [B, W - 1, C]; rows before the block.
      rows: [B, T, ·]; rows of the block before the convolution, in the first C columns.
    """
    return implementations.run(
        implementation,
        memory,
        before,
        *block,
        rows,
        count,
        path,
        reference=_commit,
        pallas=tpu.commit_block_tpu,
        unsupported=tpu.unsupported(rows, memory),
    )


def convolve(
    heads: Heads, before: jax.Array, widths: tuple[int, int], **masks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values of all heads, float32 [B, T, heads, width].

    Args:
      before: [B, W - 1, C]; rows before the first one.
      widths: Elements of a key and of a value, dk and dv.
      **masks: Masks of `causal_conv`.
    """
    key_width, value_width = widths
    channels = heads.conv.shape[0]
    mixed = jax.nn.silu(causal_conv(heads.rows[..., :channels], before, heads.conv, **masks))
    size = (channels - heads.log_decay.shape[-1] * value_width) // 2
    parts = jnp.split(mixed, [size, 2 * size], axis=-1)
    queries, keys, values = (
        part.reshape(*part.shape[:2], -1, width)
        for part, width in zip(parts, (key_width, key_width, value_width), strict=True)
    )
    return tpu.unit(queries) * key_width**-0.5, tpu.unit(keys), values


def gated(heads: Heads, outputs: jax.Array, eps: float) -> jax.Array:
    """Normalizes and gates outputs float32 [B, T, V, dv]; returns [B, T, V · dv]."""
    gate = heads.rows[..., heads.conv.shape[0] :]
    normed = rms_norm(outputs, heads.scale.astype(jnp.float32), eps)
    return (normed.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def _verify(*arrays, eps: float):
    heads, (memory, before, ancestry) = Heads(*arrays[:5]), arrays[5:]
    projected = convolve(heads, before, memory.shape[2:], ancestry=ancestry)
    outputs, block = gated_delta.solve_block(
        *projected, heads.log_decay, heads.beta, memory, ancestry
    )
    return gated(heads, outputs, eps), *block


def _commit(memory, before, keys, updates, log_decay, rows, count, path):
    block = Block(keys, updates, log_decay)
    return (
        gated_delta.advance(memory, block, count, path),
        last_rows(before, rows[..., : before.shape[-1]], count, path),
    )
