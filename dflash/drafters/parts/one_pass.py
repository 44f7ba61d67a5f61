"""Base of drafters that compute the distributions of all draft positions in a single pass."""

from collections.abc import Callable

import jax

from dflash import errors
from dflash.drafters.base import Proposal
from dflash.drafters.parts import token_tree
from dflash.drafters.parts.calibration import Calibration
from dflash.drafters.parts.sampler import Sampler
from dflash.drafters.parts.weighted import WeightedDrafter


class OnePassDrafter(WeightedDrafter):
    """Base of one-pass drafters.

    A chain has one token per draft position; a tree has the most likely prefixes of the block.

    Attributes:
      num_positions: Number of draft positions in the block, which follow the anchor.
      tree_budget: Number of drafts in a tree; None for a chain.
      calibration: Calibration of the drafts; empty for none.
    """

    has_probs = True
    num_positions: int = 0
    tree_budget: int | None = None
    calibration: Calibration = ()

    def set_sizes(
        self,
        trained: int,
        block_size: int | None,
        tree_budget: int | None,
        *,
        vocab_size: int,
        of: str,
    ) -> None:
        """Sets the size of the block and of the tree.

        Args:
          trained: Rows of the block in training.
          block_size: Rows of the block in decoding; None for `trained`.
          tree_budget: Number of drafts in a tree; None for a chain.
          vocab_size: Number of tokens that can be drafted.
          of: Phrase that follows the trained block size in the error message.
        Raises:
          ConfigError: The block size exceeds the trained one, or the budget the tree's capacity.
        """
        if block_size is not None and block_size > trained:
            raise errors.ConfigError(
                f"drafter.block_size: {block_size} is larger than the block size {trained} {of}"
            )
        self.num_positions = (block_size or trained) - 1
        self.tree_budget = tree_budget
        self.num_draft_tokens = self.num_positions if tree_budget is None else tree_budget
        if tree_budget is not None:
            token_tree.check_budget(tree_budget, self.num_positions, vocab_size)

    @property
    def drafts_trees(self) -> bool:
        return self.tree_budget is not None

    @property
    def longest_path(self) -> int:
        """Rows on the longest path; a tree is no deeper than the block."""
        return min(self.num_positions, self.num_draft_tokens) + 1

    def propose(
        self,
        hidden: jax.Array,
        positions: jax.Array,
        unembed: Callable[[jax.Array], jax.Array],
        sampler: Sampler,
        count: int,
    ) -> Proposal:
        """Proposes a chain or a tree of `count` drafts.

        Args:
          hidden: Hidden states of the draft positions, [B, D, width].
          positions: int32 [B, D]; absolute positions.
          unembed: Function from hidden states [B, D, width] to logits float32 [B, D, V].
          count: Number of drafts; D for a chain.
        """
        logits = unembed(hidden)
        if self.tree_budget is not None:
            return token_tree.propose(logits, positions, sampler, count, self.calibration)
        tokens, probs = sampler.propose(logits, positions)
        return Proposal(tokens, probs=probs)
