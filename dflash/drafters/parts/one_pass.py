"""Drafters that have a distribution for every draft position of a block after a single pass."""

import jax

from dflash import errors
from dflash.drafters.base import Proposal, Sampler
from dflash.drafters.parts import token_tree
from dflash.drafters.parts.weighted import WeightedDrafter


class OnePassDrafter(WeightedDrafter):
    """Base of such drafters: a chain takes a token of each position, a tree the likeliest prefixes.

    Attributes:
      num_positions: draft positions of the block, those after the anchor.
      tree_budget: drafts in a tree; None for a chain.
    """

    has_probs = True
    num_positions: int = 0
    tree_budget: int | None = None

    def set_sizes(
        self,
        trained: int,
        block_size: int | None,
        tree_budget: int | None,
        *,
        vocab_size: int,
        of: str,
    ) -> None:
        """Sets how much is drafted.

        Args:
          trained: rows of the block that the drafter was trained with.
          block_size: rows to draft with; None for that many.
          tree_budget: drafts in a tree; None for a chain.
          vocab_size: of the target.
          of: what has the trained block size, for the message.
        Raises:
          ConfigError: block_size exceeds the trained one, or tree_budget the tree's capacity.
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
    def longest_path(self) -> int:
        """Rows of the longest path; a tree is no deeper than the block."""
        return min(self.num_positions, self.num_draft_tokens) + 1

    def propose(self, logits: jax.Array, positions: jax.Array, sampler: Sampler) -> Proposal:
        """A chain or a tree from logits float32 [B, G, V] at positions int32 [B, G]."""
        if self.tree_budget is not None:
            return token_tree.propose(logits, positions, sampler, self.tree_budget)
        tokens, probs = sampler.propose(logits, positions)
        return Proposal(tokens, probs=probs)
