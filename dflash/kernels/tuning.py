"""Block sizes of the Pallas kernels, as data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile sizes of an attention kernel.

    Attributes:
      keys: Context rows per tile.
      queries: New rows per tile; fewer new rows form a single, smaller tile.
    """

    keys: int
    queries: int


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """Tile sizes of the latent attention kernel.

    Attributes:
      keys: Context rows per tile.
      step_rows: Query rows, of whole heads, per pass over the context.
      chunk_rows: Query rows, of whole heads, per score matrix.
    """

    keys: int
    step_rows: int
    chunk_rows: int


# Sizes by head_dim. 512 keys amortize a tile's fixed cost; wider heads fill VMEM sooner.
PAGED_ATTENTION = {64: BlockSizes(512, 128), 128: BlockSizes(512, 128), 256: BlockSizes(256, 128)}
BLOCK_ATTENTION = PAGED_ATTENTION
# `queries` counts block rows times query heads per kv head.
ANCHORED_ATTENTION = {
    64: BlockSizes(512, 512),
    128: BlockSizes(512, 512),
    256: BlockSizes(256, 512),
}
# On every chip, 512 rows take longer to attend to a tile than the next tile takes to arrive.
LATENT_ATTENTION = LatentSizes(512, 512, 128)
# Elements of a group's weights per step of grouped_matmul: enough to hide the transfer of the next
# ones, and few enough to be widened in VMEM.
GROUPED_WEIGHTS = 2**21
# Up to this many rows, grouped_matmul keeps all rows in VMEM: selecting the rows of a tile then
# costs no more than multiplying them.
GROUPED_ROWS = 512
