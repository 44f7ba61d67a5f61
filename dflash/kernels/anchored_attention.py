"""Block attention for training: many anchored blocks per sequence over one shared context."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dflash.kernels import anchored_attention_tpu as tpu
from dflash.kernels import implementation as implementations
from dflash.kernels import online_softmax, tuning
from dflash.kernels.block_attention import visible_inside

# Blocks per group; scores exist for one group at a time, forward and backward.
GROUP_BLOCKS = 8


def anchored_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    anchors: jax.Array,
    valid: jax.Array,
    segment_ids: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
    group_blocks: int = GROUP_BLOCKS,
    implementation: str = "auto",
    sizes: tuning.BlockSizes | None = None,
) -> jax.Array:
    """Attends from A blocks of R rows to the context before each block, and to the block itself.

    A row of block j sees context row p iff p < anchors[b, j] and p is in the anchor's document. It
    also sees all rows of its own block (if `causal`, those up to itself), but no other block. If a
    window is set, row r of the block, at anchors[b, j] + r, sees no key that is `window` or more
    positions before or after it, in the context or in the block.

    Args:
      queries: [B, A, R, N, H].
      keys: [B, A, R, K, H]; N is a multiple of K.
      values: [B, A, R, K, H].
      context_keys: [B, T, K, H].
      context_values: [B, T, K, H].
      anchors: int32 [B, A], in [0, T).
      valid: bool [B, A]; blocks that are not valid return zeros and contribute no gradient.
      segment_ids: int32 [B, T]; rows of one document share an id. 0 is padding.
      sinks: [N]; attention sink of each head, as in `block_attention`, or None. The kernels do not
        support sinks.
      window: Positions up to its own that a row sees; None for all.
      causal: Row r sees rows up to r of its block only.
      group_blocks: Blocks per group of the reference.
    Returns:
      [B, A, R, N, H] in the dtype of `queries`.
    Raises:
      ValueError: Shapes are inconsistent or exceed VMEM; the message names the array.
    """
    floats = (queries, keys, values, context_keys, context_values)
    masks = (anchors, valid, segment_ids)
    _check(*floats, *masks)
    view = {"scale": scale, "window": window, "causal": causal}
    reference = functools.partial(_reference, sinks=sinks, group_blocks=group_blocks, **view)
    unsupported = tpu.unsupported(queries) or (sinks is not None and f"{tpu.OP}: sinks") or None
    if implementation == "reference" or (implementation == "auto" and unsupported):
        return reference(*floats, *masks)
    kernels = _Kernels(
        implementation,
        unsupported,
        reference,
        sizes or tuning.ANCHORED_ATTENTION.get(queries.shape[-1]),
        **view,
    )
    return _attend(kernels, floats, masks)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """Forward and backward pass, each of which chooses its implementation when it is lowered.

    A single choice around both passes would keep the residuals of all implementations.
    """

    implementation: str
    unsupported: str | None
    reference: functools.partial
    sizes: tuning.BlockSizes
    scale: float
    window: int | None
    causal: bool

    def forward(self, floats, masks):
        """Returns outputs, and log2 of each row's softmax sum, which the reference leaves at 0."""
        tiling = tpu.AnchoredTiling(floats[0], floats[1], floats[3], self.sizes)

        def reference(*arrays):
            return self.reference(*arrays), jnp.zeros(tiling.per_row_shape, jnp.float32)

        def pallas(*arrays, interpret):
            bounds = tiling.bounds(*arrays[5:], self.window)
            outputs, log_sum = tpu.forward(
                tiling, _split(tiling, arrays[:5]), bounds,
                scale=self.scale, window=self.window, causal=self.causal, interpret=interpret,
            )  # fmt: skip
            return tiling.join_blocks(outputs), log_sum

        return self._run(reference, pallas, *floats, *masks)

    def backward(self, floats, masks, outputs, log_sum, grad):
        """Returns the gradients of the five float arrays."""
        tiling = tpu.AnchoredTiling(floats[0], floats[1], floats[3], self.sizes)

        def reference(*arrays):
            floats, masks, grad = arrays[:5], arrays[5:8], arrays[10]
            return jax.vjp(lambda *x: self.reference(*x, *masks), *floats)[1](grad)

        def pallas(*arrays, interpret):
            bounds = tiling.bounds(*arrays[5:8], self.window)
            outputs, log_sum, grad = arrays[8:]
            grads = tpu.backward(
                tiling, _split(tiling, arrays[:5]), bounds,
                tiling.split_blocks(outputs), log_sum, tiling.split_blocks(grad),
                scale=self.scale, window=self.window, causal=self.causal, interpret=interpret,
            )  # fmt: skip
            joins = [tiling.join_blocks] * 3 + [tiling.join_context] * 2
            return tuple(
                join(gradient).astype(array.dtype)
                for join, gradient, array in zip(joins, grads, arrays, strict=False)
            )

        return self._run(reference, pallas, *floats, *masks, outputs, log_sum, grad)

    def _run(self, reference, pallas, *arrays):
        return implementations.run(
            self.implementation,
            *arrays,
            reference=reference,
            pallas=pallas,
            unsupported=self.unsupported,
        )


def _split(tiling, floats):
    splits = [tiling.split_blocks] * 3 + [tiling.split_context] * 2
    return [split(array) for split, array in zip(splits, floats, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernels: _Kernels, floats, masks):
    return kernels.forward(floats, masks)[0]


def _attend_forward(kernels, floats, masks):
    outputs, log_sum = kernels.forward(floats, masks)
    return outputs, (floats, masks, outputs, log_sum)


def _attend_backward(kernels, residuals, grad):
    return kernels.backward(*residuals, grad), None


_attend.defvjp(_attend_forward, _attend_backward)


def _reference(*arrays, sinks, group_blocks, **view):
    queries, keys, values, context_keys, context_values, anchors, valid, segment_ids = arrays
    blocks = queries.shape[1]
    group = min(group_blocks, blocks)
    attend = functools.partial(_attend_group, **view)
    context = context_keys, context_values, segment_ids

    def step(arrays):
        return jax.checkpoint(attend)(context, sinks, *arrays)

    per_group = (queries, keys, values, anchors, valid)
    outputs = jax.lax.map(step, [_cut(array, group) for array in per_group])
    outputs = outputs.swapaxes(0, 1)
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :blocks]


def visible_context(
    anchors: jax.Array, segment_ids: jax.Array, block: int, window: int | None
) -> jax.Array:
    """Returns the mask of the context rows that each row of each block sees.

    Args:
      anchors: int32 [B, A].
      segment_ids: int32 [B, T].
      block: Number of rows R per block.
    Returns:
      bool [B, A, R, T].
    """
    positions = jnp.arange(segment_ids.shape[1])
    documents = jnp.take_along_axis(segment_ids, anchors, axis=1)
    visible = positions < anchors[..., None]
    visible &= segment_ids[:, None, :] == documents[..., None]
    visible = jnp.repeat(visible[:, :, None], block, axis=2)
    if window is not None:
        rows = anchors[..., None] + jnp.arange(block)
        visible &= positions > rows[..., None] - window
    return visible


def _attend_group(context, sinks, queries, keys, values, anchors, valid, *, scale, window, causal):
    context_keys, context_values, segment_ids = context
    batch, blocks, block, heads, width = queries.shape
    kv_heads = keys.shape[3]
    share = heads // kv_heads
    inside = visible_inside(block, window=window, causal=causal)
    # An invalid block also sees itself, so that every row has a key; its outputs are zeroed below.
    of_block = online_softmax.attend(
        online_softmax.group_queries(queries.reshape(-1, block, heads, width), kv_heads),
        keys.reshape(-1, block, kv_heads, width).transpose(2, 0, 1, 3),
        values.reshape(-1, block, kv_heads, width).transpose(2, 0, 1, 3),
        jnp.repeat(inside, share, axis=0),
        scale=scale,
    )
    of_block = jax.tree.map(lambda x: x.reshape(kv_heads, batch, -1, x.shape[-1]), of_block)
    rows = online_softmax.group_queries(queries.reshape(batch, -1, heads, width), kv_heads)

    seen = visible_context(anchors, segment_ids, block, window)
    of_context = online_softmax.attend(
        rows,
        context_keys.transpose(2, 0, 1, 3),
        context_values.transpose(2, 0, 1, 3),
        jnp.repeat(seen.reshape(batch, blocks * block, -1), share, axis=1),
        scale=scale,
    )
    together = online_softmax.merge(of_block, of_context)
    if sinks is not None:
        together = online_softmax.with_sinks(together, sinks)
    attended = online_softmax.normalize(together, queries.dtype)
    attended = online_softmax.ungroup(attended, blocks * block).reshape(queries.shape)
    return jnp.where(valid[:, :, None, None, None], attended, 0)


def _cut(array: jax.Array, group: int) -> jax.Array:
    """Splits blocks [B, A, ...] into groups [groups, B, group, ...], padded with zeros."""
    batch, blocks = array.shape[:2]
    padding = [(0, 0), (0, -blocks % group)] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, padding).reshape(batch, -1, group, *array.shape[2:]).swapaxes(0, 1)


def _check(queries, keys, values, context_keys, context_values, anchors, valid, segment_ids):
    batch, blocks, block, heads, width = queries.shape
    kv_heads, length = keys.shape[3], segment_ids.shape[1]
    expected = {
        "keys": (keys, (batch, blocks, block, kv_heads, width)),
        "values": (values, (batch, blocks, block, kv_heads, width)),
        "context_keys": (context_keys, (batch, length, kv_heads, width)),
        "context_values": (context_values, (batch, length, kv_heads, width)),
        "anchors": (anchors, (batch, blocks)),
        "valid": (valid, (batch, blocks)),
        "segment_ids": (segment_ids, (batch, length)),
    }
    implementations.check_shapes(tpu.OP, expected, heads, kv_heads)
