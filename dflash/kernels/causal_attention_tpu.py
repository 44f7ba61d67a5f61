"""Causal attention over packed rows for TPUs, by the splash attention kernels that jax ships.

They keep no scores in main memory, and skip the blocks of keys that no query of a block sees.
"""

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

OP = "causal_attention"

# Queries and keys per step, the largest that divides the rows. 512 by 512 float32 scores are 1 MiB
# of VMEM, as much again their exponentials.
BLOCKS = (512, 384, 256, 128)
_LANES = 128


def unsupported(queries: jax.Array) -> str | None:
    """Why the kernels do not cover queries [B, T, N, H]; None if they do."""
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
    interpret,
) -> jax.Array:
    """`causal_attention.causal_attention` of shapes that are not `unsupported`.

    It can be differentiated; the backward pass is a kernel too.
    """
    _, length, heads, _ = queries.shape
    block = next(size for size in BLOCKS if length % size == 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=bool(interpret),  # plainly: the strict interpreter knows no batched kernels
    )

    def one(queries, keys, values, segment_ids):
        return kernel(queries, keys, values, splash.SegmentIds(segment_ids, segment_ids))

    # Heads before rows. The kernels know no factor on the scores, and there are fewer keys.
    rows = (x.swapaxes(1, 2) for x in (queries, (keys * scale).astype(keys.dtype), values))
    return jax.vmap(one)(*rows, segment_ids).swapaxes(1, 2)
