"""A drafter that knows the outcome: it drafts what a script says, right or wrong, chain or tree.

It remembers all that it observes, and drafts rightly only while its memory is right.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.drafters.base import Drafter, Proposal
from support.models import ARCHITECTURE, ONE_DEVICE, make_sharding

VOCAB = ARCHITECTURE.vocab_size


class Script:
    """At each position of an anchor: the shape of the tree to draft, and where it is right.

    Attributes:
      parents: int [L, G]; row that draft g continues.
      offsets: int [L, G + 1]; which child of each row is the right one, counted among its
        siblings. No child is, if there are not that many.
    """

    def __init__(self, parents: np.ndarray, offsets: np.ndarray):
        self.parents, self.offsets = parents, offsets
        length, drafts = parents.shape
        self.depth = np.zeros((length, drafts), np.int32)
        self.rank = np.zeros((length, drafts), np.int32)
        for position in range(length):
            children = [0] * (drafts + 1)
            for g, parent in enumerate(parents[position]):
                self.depth[position, g] = 1 + (self.depth[position, parent - 1] if parent else 0)
                self.rank[position, g] = children[parent]
                children[parent] += 1

    @classmethod
    def chain(cls, length: int, drafts: int, wrong: np.ndarray | bool) -> "Script":
        """A chain whose draft after row r of the anchor at p is wrong where wrong[p, r]."""
        wrong = np.broadcast_to(wrong, (length, drafts + 1))
        return cls(np.tile(np.arange(drafts), (length, 1)), wrong.astype(np.int32))

    @classmethod
    def random_tree(
        cls, length: int, drafts: int, rng: np.random.Generator, depth: int | None = None
    ) -> "Script":
        """Trees of every shape up to a depth, at each row of which one child is right, or none."""
        parents = []
        for _ in range(length):
            depths, mine = [0], []
            for _ in range(drafts):
                mine.append(rng.choice(np.flatnonzero(np.array(depths) < (depth or drafts))))
                depths.append(depths[mine[-1]] + 1)
            parents.append(mine)
        return cls(np.array(parents), rng.integers(0, 2, (length, drafts + 1)))

    def acceptance_lengths(self, prompt_length: int, num_tokens: int) -> tuple[int, ...]:
        """What decoding must come to for `num_tokens` new tokens after a prompt."""
        lengths = []
        position, last = prompt_length, prompt_length + num_tokens - 1
        while position < last:
            row, accepted = 0, 0
            while True:
                children = np.flatnonzero(self.parents[position] == row)
                right = self.offsets[position, row]
                if right >= len(children):
                    break
                row, accepted = children[right] + 1, accepted + 1
            lengths.append(min(accepted + 1, last - position))
            position += lengths[-1]
        return tuple(lengths)


class ScriptedDrafter(Drafter):
    """Drafts from `texts` as `script` says; its state is every token and feature it was shown."""

    def __init__(
        self,
        script: Script,
        texts: Sequence[Sequence[int]],
        *,
        tree: bool,
        depth: int | None = None,
    ):
        """Args: depth: no draft of the script is deeper; None: as many as there are drafts."""
        length = script.parents.shape[0]
        padded = [[*text, *[0] * (length - len(text))] for text in texts]
        self.texts = nnx.Variable(jnp.array(padded, jnp.int32))
        self.parents = nnx.Variable(jnp.array(script.parents, jnp.int32))
        self.offsets = nnx.Variable(jnp.array(script.offsets, jnp.int32))
        self.depth = nnx.Variable(jnp.array(script.depth, jnp.int32))
        self.rank = nnx.Variable(jnp.array(script.rank, jnp.int32))
        self.tree = tree
        self.max_depth = depth
        self.feature_layers = (1, 0)
        self.num_draft_tokens = script.parents.shape[1]

    @property
    def longest_path(self):
        return self.block_size if self.max_depth is None else self.max_depth + 1

    def init_state(self, batch, max_length):
        width = len(self.feature_layers) * ARCHITECTURE.hidden_size
        rows = (batch, max_length + self.block_size)
        whole = make_sharding(*ONE_DEVICE).abstract
        return {
            "count": whole((batch,), (None,), jnp.int32),
            "tokens": whole(rows, (None, None), jnp.int32),
            "following": whole(rows, (None, None), jnp.int32),
            "features": whole((*rows, width), (None, None, None), jnp.float32),
        }

    def draft(self, state, anchor, position, sampler, heads):
        batch = jnp.arange(anchor.shape[0])
        seen = state["tokens"].at[batch, position].set(anchor)
        known = jnp.arange(seen.shape[1]) <= position[:, None]
        texts = self.texts[...][:, : seen.shape[1]]
        same = jnp.all((seen[:, None] == texts) | ~known[:, None], axis=-1)
        parents = self.parents[...][position]
        right = self.texts[...][
            jnp.argmax(same, axis=1)[:, None], position[:, None] + self.depth[...][position]
        ]
        offsets = jnp.take_along_axis(self.offsets[...][position], parents, axis=1)
        tokens = (right + self.rank[...][position] - offsets) % VOCAB
        # What a drafter with a wrong memory drafts is wrong too.
        remembers = same.any(axis=1) & (state["count"] == position)
        tokens = jnp.where(remembers[:, None], tokens, (right + VOCAB // 2) % VOCAB)
        if not self.tree:
            return Proposal(tokens), state
        # Any confidence will do, as long as it differs between sequences.
        spread = (position * 37 + anchor) % 64 / 64
        confidence = jnp.broadcast_to(spread[:, None], tokens.shape)
        return Proposal(tokens, parents, confidence=confidence), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        rows = jnp.arange(features.shape[1])
        # Rows that do not count go past the end, where they are dropped.
        at = jnp.where(rows < num_committed[:, None], position[:, None] + rows, 1 << 20)
        batch = jnp.arange(at.shape[0])[:, None]
        return {
            "count": state["count"] + num_committed,
            "tokens": state["tokens"].at[batch, at].set(tokens[:, :-1], mode="drop"),
            "following": state["following"].at[batch, at].set(tokens[:, 1:], mode="drop"),
            "features": state["features"].at[batch, at].set(features, mode="drop"),
        }
