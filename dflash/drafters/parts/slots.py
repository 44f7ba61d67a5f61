"""What drafters share that have a distribution for every slot of a block after a single pass."""

import jax

from dflash import errors
from dflash.drafters.base import Drafter, Proposal, Sampler
from dflash.drafters.parts import token_tree


class SlotDrafter(Drafter):
    """Base of such drafters: a chain takes a token of each slot, a tree the likeliest prefixes.

    Attributes:
      num_slots: slots after the anchor's in the block that is drafted.
      tree_budget: drafts in a tree; None for a chain.
    """

    has_probs = True
    num_slots: int = 0
    tree_budget: int | None = None

    def use_slots(
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
          of: whose the trained block size is, for the message.
        Raises:
          ConfigError: block_size is larger than the trained one, or tree_budget than a tree gets.
        """
        if block_size is not None and block_size > trained:
            raise errors.ConfigError(
                f"drafter.block_size: {block_size} is larger than the block size {trained} {of}"
            )
        self.num_slots = (block_size or trained) - 1
        self.tree_budget = tree_budget
        self.num_draft_tokens = self.num_slots if tree_budget is None else tree_budget
        if tree_budget is not None:
            token_tree.check_budget(tree_budget, self.num_slots, vocab_size)

    @property
    def longest_path(self) -> int:
        """Rows of the longest path; a tree is no deeper than there are slots."""
        return min(self.num_slots, self.num_draft_tokens) + 1

    def propose(self, logits: jax.Array, positions: jax.Array, sampler: Sampler) -> Proposal:
        """A chain or a tree of slots with logits float32 [B, G, V] at positions int32 [B, G]."""
        if self.tree_budget is not None:
            return token_tree.propose(logits, positions, sampler, self.tree_budget)
        tokens, probs = sampler.propose(logits, positions)
        return Proposal(tokens, probs=probs)
