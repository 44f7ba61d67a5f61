"""Pallas kernel of paged attention over packed rows; see paged_attention.py for its semantics.

A grid step is that of paged_attention_tpu.py: it reads the rows of its sequence out of the packed
ones, attends, and writes the outputs back among the packed ones. Packed rows stay in VMEM for all
sequences. They are kept in float32 there, since rows of 32 bits can be read and written at any
offset. The outputs of the padding are overwritten by those of the next sequence.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu, paged_attention_tpu
from dflash.kernels.paged_attention_tpu import OP, PagedTiling
from dflash.kernels.quantized import Quantized
from dflash.kernels.tuning import BlockSizes


def packed_attention_tpu(*arrays, scale: float, window: int | None, sizes: BlockSizes, interpret):
    """Computes `packed_attention`."""
    *rows, key_pages, value_pages, page_table, start, packing, tree_mask, sinks = arrays
    queries, keys, values = rows
    has_sinks = sinks is not None
    tiling = PackedTiling(
        queries, packing, key_pages, page_table, tree_mask, window, has_sinks, sizes
    )
    by_head = [rows[0].swapaxes(0, 1) for rows in (queries, keys, values)]
    by_head[1:] = [rows.astype(key_pages.dtype) for rows in by_head[1:]]
    outputs, *pools = paged_attention_tpu.call(
        functools.partial(_kernel, tiling=tiling, scale=scale),
        tiling,
        (packing.place[:, 0], packing.place[:, -1], page_table.reshape(-1), start),
        [*by_head, *tiling.shared_inputs(tree_mask, sinks)],
        key_pages,
        value_pages,
        interpret,
    )
    return outputs.reshape(queries.shape), *pools


class PackedTiling(PagedTiling):
    """Shapes of one call over N packed rows, of up to T for each sequence."""

    suffix = "_packed"

    def __init__(
        self, queries, packing, pages, page_table, tree_mask, window, has_sinks, sizes: BlockSizes
    ):
        self.total = queries.shape[1]
        padded = jax.ShapeDtypeStruct((*packing.place.shape, *queries.shape[2:]), queries.dtype)
        super().__init__(padded, pages, page_table, tree_mask, window, has_sinks, sizes)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the outputs: [N, heads · H]."""
        return self.total, self.heads * self.width

    def output_spec(self) -> pl.BlockSpec:
        columns = self.step_heads * self.group * self.width
        return pl.BlockSpec((self.total, columns), lambda g, b, i, *_: (0, g))

    def store(self, outputs_ref, head, rows):
        """Stores the outputs [R, H] of a head of the grid step's by query head, [N/K, T, H]."""
        for member in range(self.group):
            member_rows = rows[member * self.length : (member + 1) * self.length]
            outputs_ref[head * self.group + member] = member_rows

    def specs(self):
        """Returns the block specs of queries, keys, values, any tree mask and any sinks."""

        def packed(heads):
            return pl.BlockSpec((heads, self.total, self.width), lambda g, b, i, *_: (g, 0, 0))

        heads = self.step_heads
        return [packed(self.group * heads), packed(heads), packed(heads), *super().specs()[3:]]

    def scratch(self):
        """Returns the scratch shapes: those of a grid step, of its rows, and of all packed rows."""
        arrays = [*self._own().values(), *self._wide().values()]
        return [*super().scratch(), *[pltpu.VMEM(*array) for array in arrays]]

    def _own(self):
        """Returns shapes and dtypes of the rows of a sequence, in the order of the scratch."""
        new = (self.step_heads, self.length, self.width), self.new_dtype
        queries = (self.step_heads, self.rows, self.width), self.dtype
        return {"own queries": queries, "own keys": new, "own values": new}

    def _wide(self):
        """Returns shapes of queries, keys, values and outputs of all packed rows, in float32.

        They have room for the padding of the last sequence.
        """
        heads, group = self.step_heads, self.group
        rows = self.total + self.length, self.width
        shares = {"queries": group, "keys": 1, "values": 1, "outputs": group}
        return {
            f"packed {name} in float32": ((heads * share, *rows), jnp.float32)
            for name, share in shares.items()
        }

    def _vmem(self):
        heads, rows = self.step_heads, (self.total, self.width)
        return {
            **super()._vmem(),
            "packed queries and outputs": ((4, heads * self.group, *rows), self.dtype),
            "packed keys and values": ((4, heads, *rows), self.new_dtype),
            **self._own(),
            **self._wide(),
        }


def _kernel(first_ref, last_ref, table_ref, start_ref, *refs, tiling: PackedTiling, scale):
    packed, refs = refs[:3], refs[3:]
    # A tree mask and sinks, if any, and the pools, which are aliased to outputs.
    num_between = tiling.has_tree + tiling.has_sinks + 2
    between, (outputs_ref, *refs) = refs[:num_between], refs[num_between:]
    scratch, own_rows, (*wide, outputs) = refs[:-7], refs[-7:-4], refs[-4:]
    sequence = pl.program_id(1)

    @pl.when(sequence == 0)
    def _():
        for rows, ref in zip(packed, wide, strict=True):
            ref[:, : tiling.total] = rows[...].astype(jnp.float32)
            ref[:, tiling.total :] = jnp.zeros((ref.shape[0], tiling.length, tiling.width))
        outputs[...] = jnp.zeros_like(outputs)

    first, last = first_ref[sequence], last_ref[sequence]
    place = pl.ds(first, tiling.length)
    # Clear the keys and values of the next sequences: a NaN among them would reach this one.
    present = jax.lax.broadcasted_iota(jnp.int32, (tiling.length, 1), 0) <= last - first
    (wide_queries, *wide_new), (own_queries, *own_new) = wide, own_rows
    for head in range(tiling.step_heads):
        members = range(head * tiling.group, (head + 1) * tiling.group)
        rows = jnp.concatenate([wide_queries[member, place] for member in members])
        own_queries[head] = rows.astype(tiling.dtype)
        for rows, ref in zip(wide_new, own_new, strict=True):
            ref[head] = jnp.where(present, rows[head, place], 0.0).astype(ref.dtype)
    paged_attention_tpu.attend_step(
        table_ref, start_ref, *own_rows, *between, outputs.at[:, place], *scratch,
        tiling=tiling, scale=scale,
    )  # fmt: skip

    @pl.when(sequence == tiling.batch - 1)
    def _():
        for head in range(outputs.shape[0]):
            columns = slice(head * tiling.width, (head + 1) * tiling.width)
            outputs_ref[:, columns] = outputs[head, : tiling.total].astype(outputs_ref.dtype)


def unsupported(queries, packing, key_pages, *tiling, sizes: BlockSizes) -> str | None:
    """Returns why the kernel does not support a call with this `PackedTiling`, or None."""
    name, width = f"{OP} of packed rows", queries.shape[-1]
    if isinstance(key_pages, Quantized):
        return f"{name}: quantized pages, expected plain ones"
    if width != flash_tpu.LANES:
        return f"{name}: head_dim {width}, expected {flash_tpu.LANES}"
    if queries.shape[0] != 1:
        return f"{name}: rows of {queries.shape[0]} replicas, expected one"
    if reason := paged_attention_tpu.unsupported(queries, key_pages):
        return reason
    try:
        shapes = PackedTiling(queries, packing, key_pages, *tiling, sizes)
    except ValueError as error:  # VMEM does not hold the rows.
        return str(error)
    if shapes.query_tiles > 1:
        return f"{name}: up to {shapes.length} of a sequence, expected at most {sizes.queries}"
    return None
