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


# By head_dim. A tile of 512 keys amortises a tile's fixed work; wider heads fill VMEM sooner.
PAGED_ATTENTION = {64: BlockSizes(512, 128), 128: BlockSizes(512, 128), 256: BlockSizes(256, 128)}
BLOCK_ATTENTION = PAGED_ATTENTION
# Here `queries` counts rows of blocks times query heads of a kv head.
ANCHORED_ATTENTION = {
    64: BlockSizes(512, 512),
    128: BlockSizes(512, 512),
    256: BlockSizes(256, 512),
}
