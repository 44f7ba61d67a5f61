"""The block of a cycle: the rows of every sequence that the target verifies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Proposal
from dflash.inference.cycle import division
from dflash.inference.cycle import tree as trees
from dflash.inference.cycle.choices import Choices
from dflash.inference.logits import nonfinite
from dflash.inference.logits.sampling import SequenceSampler
from dflash.kernels.packing import Packing
from dflash.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows to verify: the anchor of each sequence, and its drafts as a chain or a tree.

    If rows are divided among sequences, each verifies the first rows of its block, and the target
    runs on these rows alone, packed. Otherwise packed rows and padded rows are the same.

    Attributes:
      proposal: Drafts of all rows.
      tokens: int32 [B, R]; anchors and drafts.
      positions: int32 [B, R]; absolute positions.
      tree: Tree of the rows; None for a chain.
      counts: int32 [B]; rows that each sequence verifies, anchor included.
      packing: Packing of these rows; None if all sequences verify R rows.
    """

    proposal: Proposal
    tokens: jax.Array
    positions: jax.Array
    tree: trees.Tree | None
    counts: jax.Array
    packing: Packing | None = None

    @classmethod
    def of(
        cls, proposal: Proposal, anchor: jax.Array, position: jax.Array, longest_path: int
    ) -> "Block":
        """Returns the block that verifies a whole proposal.

        Args:
          anchor: int32 [B]; last committed tokens.
          position: int32 [B]; positions of the anchors.
          longest_path: Rows on the longest path that the drafter proposes, anchor included.
        """
        tokens = jnp.concatenate([anchor[:, None], proposal.tokens], axis=1)
        tree, depth = None, jnp.arange(tokens.shape[1])
        if proposal.parents is not None:
            deepest = min(longest_path - 1, proposal.tokens.shape[1])
            tree = trees.from_parents(proposal.parents, deepest)
            depth = tree.depth
        positions = jnp.broadcast_to(position[:, None] + depth, tokens.shape)
        return cls(proposal, tokens, positions, tree, jnp.full_like(anchor, tokens.shape[1]))

    def divided(
        self, active: jax.Array, room: jax.Array, mean_rows: int, choices: Choices
    ) -> "Block":
        """Returns the block with fewer rows, divided by the drafter's confidence.

        Args:
          active: bool [B]; the other sequences verify nothing.
          room: int32 [B]; tokens that each sequence may commit.
          mean_rows: Mean number of rows per slot.
        """
        replicas, (batch, rows) = choices.num_replicas, self.tokens.shape
        chances = division.survival(self.proposal.confidence, active, room, trees=choices.trees)
        counts = division.divide(chances, active, mean_rows, replicas)
        packing = Packing.of(counts, rows, batch // replicas * mean_rows, replicas)
        return dataclasses.replace(self, counts=counts, packing=packing)

    def limited(self, rows: jax.Array) -> "Block":
        """Returns the block with only the first `rows` rows to verify, int32 [] at least 1."""
        return dataclasses.replace(self, counts=jnp.full_like(self.counts, rows))

    def padded(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens and positions of a chain with further rows, `rows` together.

        No row of the chain sees the further ones.
        """
        extra = rows - self.tokens.shape[1]
        positions = self.positions[:, :1] + jnp.arange(rows)
        return jnp.pad(self.tokens, ((0, 0), (0, extra))), positions

    @property
    def num_drafts(self) -> int:
        """Number of drafts of each sequence, G = R - 1."""
        return self.tokens.shape[1] - 1

    @property
    def ancestry(self) -> jax.Array | None:
        """Attention mask of the rows of a tree, bool [B, R, R]; None for a chain."""
        return None if self.tree is None else self.tree.ancestry

    @property
    def verified(self) -> Proposal:
        """The proposal with -1 in place of drafts that are not verified; see `verify`."""
        verified = jnp.arange(1, self.num_drafts + 1) < self.counts[:, None]
        tokens = jnp.where(verified, self.proposal.tokens, -1)
        return dataclasses.replace(self.proposal, tokens=tokens)

    def pack(self, rows: Any) -> Any:
        """Returns the rows that the target computes, [D, N, …] if they are packed."""
        return rows if self.packing is None else self.packing.pack(rows)

    def unpack(self, rows: Any) -> Any:
        """Returns the rows [B, R, …] of what the target has computed."""
        if self.packing is not None:
            return self.packing.unpack(rows)
        return rows[:, : self.tokens.shape[1]]  # Without those of `padded`.

    def sample(self, sampler: SequenceSampler, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Samples the target's token after every row.

        Packed rows are sampled as they are, since padding logits would copy them.

        Returns:
          Tokens int32 [B, R], and which rows have finite logits, bool [B, R].
        """
        positions = self.positions + 1
        if self.packing is not None:
            sampler, positions = sampler.of_rows(self.packing, positions)
            logits = logits.reshape(-1, 1, logits.shape[-1])
        sampled = sampler.sample(logits, positions)
        finite = nonfinite.finite_rows(logits, sampled)
        if self.packing is None:
            return sampled, finite
        shape = self.packing.source.shape
        return self.unpack(sampled.reshape(shape)), self.unpack(finite.reshape(shape))

    def sample_in_tiles(
        self, sampler: SequenceSampler, target: Decoder, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what `sample` does, given hidden states, without logits of all rows."""
        positions = self.positions + 1
        if self.packing is not None:
            sampler, positions = sampler.of_rows(self.packing, positions)
        noise = jax.tree.map(
            lambda rows: rows.reshape(*hidden.shape[:2], *rows.shape[2:]), sampler.noise(positions)
        )
        sampled, finite = target.unembed_argmax(hidden, noise)
        return self.unpack(sampled), self.unpack(finite)
