"""Block sizes of the Pallas kernels, as data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How much of an attention's operands one step works on.

    Attributes:
      keys: context rows per tile.
      queries: new rows per tile; fewer form one tile of their own.
    """

    keys: int
    queries: int


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """How much of latent attention's operands one step works on.

    Attributes:
      keys: context rows per tile.
      step_rows: query rows, of whole heads, for which the context is read once.
      chunk_rows: of those, rows that are weighed together.
    """

    keys: int
    step_rows: int
    chunk_rows: int


# By head_dim. A tile of 512 keys amortises a tile's fixed work; wider heads fill VMEM sooner.
PAGED_ATTENTION = {64: BlockSizes(512, 128), 128: BlockSizes(512, 128), 256: BlockSizes(256, 128)}
BLOCK_ATTENTION = PAGED_ATTENTION
# Here `queries` counts rows of blocks times query heads of a kv head.
ANCHORED_ATTENTION = {
    64: BlockSizes(512, 512),
    128: BlockSizes(512, 512),
    256: BlockSizes(256, 512),
}
# 512 rows compute for longer on a tile than it takes to arrive, on every chip.
LATENT_ATTENTION = LatentSizes(512, 512, 128)
# Weights of a group that a step of grouped_matmul multiplies with: enough to hide that the
# next ones arrive, and few enough to widen in VMEM.
GROUPED_WEIGHTS = 2**21
# Rows that it keeps in VMEM whole: picking a tile of them costs no more than its product.
GROUPED_ROWS = 512
