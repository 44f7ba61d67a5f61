"""Causal attention over packed rows for TPUs, by JAX's splash attention kernels.

The kernels store no scores in HBM, and skip key blocks that no query of a block sees.
"""

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

OP = "causal_attention"

# Queries and keys per step; the largest size that divides the number of rows is used. 512 × 512
# float32 scores take 1 MiB of VMEM, and their exponentials another 1 MiB.
BLOCKS = (512, 384, 256, 128)
_LANES = 128


def unsupported(queries: jax.Array, sinks: jax.Array | None) -> str | None:
    """Returns why the kernels do not support queries [B, T, N, H], or None if they do."""
    if sinks is not None:
        return f"{OP}: the TPU kernels have no attention sinks"
    _, length, _, width = queries.shape
    if width % _LANES:
        return f"{OP}: the TPU kernels need a width divisible by {_LANES}, not {width}"
    if length % BLOCKS[-1]:
        return f"{OP}: the TPU kernels need rows divisible by {BLOCKS[-1]}, not {length}"
    return None


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float,
    window: int | None,
    interpret,
) -> jax.Array:
    """Computes `causal_attention.causal_attention` for shapes that are supported.

    It is differentiable; the backward pass is a kernel too.
    """
    _, length, heads, _ = queries.shape
    block = next(size for size in BLOCKS if length % size == 0)
    mask = splash.CausalMask((length, length))
    if window is not None:
        mask = splash.LocalMask((length, length), (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=bool(interpret),  # The strict interpreter lacks batching.
    )

    def attend_sequence(queries, keys, values, segment_ids):
        return kernel(queries, keys, values, splash.SegmentIds(segment_ids, segment_ids))

    # The kernels expect heads before rows and take no scale, so scale the keys, the smaller array.
    rows = (x.swapaxes(1, 2) for x in (queries, (keys * scale).astype(keys.dtype), values))
    return jax.vmap(attend_sequence)(*rows, segment_ids).swapaxes(1, 2)
