"""DFlash drafters that condition each draft position on the token drafted before it.

One pass over the block computes the base logits, as in DFlash. Tokens are then drawn sequentially:
a small head maps the previous token and the hidden state of the draft position to a vector of a few
hundred dimensions, which corrects the logits through a table over the vocabulary.

The head may also run over several prefixes at once. A tree is grown level by level from its scores,
each node given its own prefix, at the cost of one pass over the block.

Source of the trees: PCTree, arXiv 2608.02123; their growth is that of `beam_tree`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash import errors
from dflash.config.schema import DrafterConfig
from dflash.drafters.base import Proposal
from dflash.drafters.base_config import ConditionalTree
from dflash.drafters.dflash import DFlash
from dflash.drafters.parts import beam_tree, calibration
from dflash.drafters.parts.blocks import Blocks, sample_anchors
from dflash.drafters.parts.draft_vocabulary import Shortlist
from dflash.drafters.parts.sampler import Candidates, Sampler
from dflash.layers.linear import Embedding
from dflash.layers.losses import TokenScores

_WIDTH, _CANDIDATES = 12, 64  # Defaults of `ConditionalTree`, as in UBTree, arXiv 2609.39972.


class ConditionedRows(NamedTuple):
    """Draft positions of blocks, each conditioned on the true token before it.

    Attributes:
      blocks: Blocks of G draft positions each.
      hidden: Hidden states of the draft positions after the final norm, [B, A, G, D].
      vectors: Outputs of the head, [B, A, G, r].
      previous: Tokens before the draft positions, int32 [B, A, G].
    """

    blocks: Blocks
    hidden: jax.Array
    vectors: jax.Array
    previous: jax.Array


class Likely(NamedTuple):
    """The k most likely tokens of each draft position, in descending order of their base logits.

    Attributes:
      tokens: Candidates, as tokens of the target, int32 [..., k].
      logits: Base logits of the candidates, float32 [..., k].
      codes: Rows of `successors` for the candidates, [..., k, r].
    """

    tokens: jax.Array
    logits: jax.Array
    codes: jax.Array


class ConditionedDFlash(DFlash):
    """Base of DFlash drafters that condition on the previous token.

    Attributes:
      tree: Sizes of the trees to draft, all of them given; None for a chain.
    """

    tree: ConditionalTree | None = None

    def __init__(
        self,
        shape: Any,
        *,
        dtype,
        sharding,
        block_size: int | None = None,
        short_pass: bool = False,
        tree: ConditionalTree | None = None,
    ):
        """Builds an abstract drafter; the other arguments are those of `DFlash`.

        Args:
          tree: Size of the trees to draft; None for a chain.
        Raises:
          ConfigError: The block size exceeds the trained one, or the tree does not fit.
        """
        build = {"dtype": dtype, "sharding": sharding}
        super().__init__(shape, block_size=block_size, short_pass=short_pass, **build)
        self._set_tree(tree)
        self.declare_head(**build)

    def declare_head(self, **build) -> None:
        """Declares the parameters that `condition` and `correct` use."""
        raise TypeError(f"{type(self).__name__} must define declare_head")

    @classmethod
    def options(cls, config: DrafterConfig) -> dict[str, Any]:
        return {name: getattr(config, name) for name in (*cls.option_names, "tree")}

    @property
    def most_candidates(self) -> int:
        """Number of tokens that can be drafted at each position of a tree."""
        return self.shape.num_draft_tokens

    @property
    def num_candidates(self) -> int | None:
        """Number of likely tokens that drafts are chosen among; None for all tokens."""
        return self.tree and self.tree.candidates

    @property
    def drafts_trees(self) -> bool:
        return self.tree is not None

    @property
    def has_confidence(self) -> bool:
        return self.drafts_trees or bool(self.calibration)

    def _set_tree(self, tree: ConditionalTree | None) -> None:
        """Sets the number of drafts and, if they form a tree, its sizes."""
        self.num_draft_tokens = self.num_positions if tree is None else tree.budget
        if tree is not None:
            self.tree = fitted(tree, self.num_positions, self.most_candidates)

    def fresh_memory(self, *lead: int) -> Any:
        """Returns the memory [*lead, …] of `condition` before the first draft position."""
        return ()

    def first_memory(self, anchor: jax.Array, hidden: jax.Array) -> Any:
        """Returns the memory before the first draft position.

        Args:
          anchor: Anchors, int32 [...].
          hidden: Hidden states of the anchors' rows, [..., D].
        """
        return self.fresh_memory(*anchor.shape)

    def prepare(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden states [..., D] to inputs of `condition`; by default the identity.

        Called once for all draft positions, ahead of the sequential loop.
        """
        return hidden

    def condition(
        self, previous: jax.Array, prepared: jax.Array, memory: Any
    ) -> tuple[jax.Array, Any]:
        """Computes the vectors of one draft position from the tokens before it.

        Args:
          previous: Tokens before the draft position, int32 [...].
          prepared: Outputs of `prepare` at the draft position, [..., d]; in a tree [B, 1, d], for
            several tokens [B, T].
          memory: Memory from the previous draft position, or from `fresh_memory`.
        Returns:
          Vectors [..., r], and the memory for the next draft position.
        """
        raise TypeError(f"{type(self).__name__} must define condition")

    @property
    def successors(self) -> Embedding:
        """Table of the codes by which vectors correct the logits of tokens, [V, r]."""
        raise TypeError(f"{type(self).__name__} must define successors")

    def bias(self, vectors: jax.Array) -> jax.Array:
        """Returns the corrections of logits, float32 [..., V], for vectors [..., r]."""
        return self.successors.attend(vectors)

    def corrected(self, base: jax.Array, vectors: jax.Array) -> jax.Array:
        """Returns the corrected logits of all tokens, float32 [..., V], from the base logits."""
        return base + self.bias(vectors)

    def choices(self, base: jax.Array) -> Any:
        """Returns the candidates of all draft positions: a pytree of arrays [B, G, …].

        These are the `Likely` tokens, or the base logits themselves if all tokens are candidates.
        Candidates do not depend on drawn tokens, so they are computed for all draft positions at
        once.

        Args:
          base: Base logits, float32 [B, G, V].
        """
        if self.num_candidates is None:
            return base
        values, tokens = jax.lax.top_k(base, self.num_candidates)
        codes = self.successors(tokens)
        if self.d2t is not None:
            tokens = self.vocabulary().name(tokens)
        return Likely(tokens, values, codes)

    def correct(
        self, choices: Any, vectors: jax.Array, sampler: Sampler
    ) -> tuple[jax.Array, Sampler]:
        """Returns the corrected logits of one draft position, and the sampler to draw with.

        Args:
          choices: Candidates of the draft position, a pytree of arrays [B, 1, …].
          vectors: Vectors of the draft position after each of T prefixes, [B, T, r].
          sampler: Sampler over the target's vocabulary.
        Returns:
          Logits float32 [B, T, V] and `sampler`; or [B, T, Q] and a sampler over a draft
          vocabulary.
        """
        if self.num_candidates is None:
            return self.corrected(choices, vectors), self.among(sampler)
        codes, columns = choices.codes, vectors[..., None]
        scores = jnp.matmul(codes, columns, preferred_element_type=jnp.float32)[..., 0]
        shortlist = Shortlist(choices.tokens, self.shape.decoder.vocab_size)
        return choices.logits + scores, sampler.among(shortlist)

    def acceptance(self, prepared: jax.Array, previous: jax.Array) -> jax.Array | None:
        """Returns the confidence [B, G] of a chain, or None if the drafter has no such estimate.

        Args:
          prepared: Outputs of `prepare` at the draft positions, [B, G, …].
          previous: Tokens before the draft positions, int32 [B, G].
        """
        return None

    def draft_fewer(self, count, state, anchor, position, sampler, heads):
        """Runs the whole block, but draws only its first tokens; see `Drafter.draft_fewer`.

        Of a tree, it drafts the best nodes only.
        """
        if self.tree is not None:
            return self._draft_tree(count, state, anchor, position, sampler, heads), state
        prepared, choices, memory = self.run_positions(count, state, anchor, position, heads)
        positions = position[:, None] + 1 + jnp.arange(count)

        def draw(carry, inputs):
            previous, memory = carry
            prepared, choices, position = inputs
            vectors, memory = self.condition(previous, prepared, memory)
            logits, draws = self.correct(choices, vectors, sampler)
            if not self.calibration:
                drawn = *draws.propose(logits, position), None
            else:
                best = draws.candidates(logits, position, 1)
                drawn = best.tokens[..., 0], best.probs, best.scores[..., 0]
            return (drawn[0], memory), drawn

        rows = prepared, choices, positions
        inputs = jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, None], rows)
        begin = anchor[:, None], memory
        _, drawn = jax.lax.scan(draw, begin, inputs)
        tokens, probs, scores = jax.tree.map(lambda x: x[:, :, 0].swapaxes(0, 1), drawn)
        if scores is None:
            previous = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
            confidence = self.acceptance(prepared, previous)
        else:
            pairs = calibration.by_depth(self.calibration, count)
            confidence = jnp.exp(calibration.log_chances(scores[..., None], pairs))[..., 0]
        return Proposal(tokens, probs=probs, confidence=confidence), state

    def run_positions(self, count, state, anchor, position, heads) -> tuple[Any, Any, Any]:
        """Runs the block, and returns the inputs of the sequential loop.

        The other arguments are those of `Drafter.draft`.

        Args:
          count: Number of draft positions, from the first one on.
        Returns:
          Inputs of `condition`, by default the outputs of `prepare`, and those of `correct`, by
          default the outputs of `choices`, at the draft positions: pytrees of arrays [B, count, …].
          Then the memory before the first of them.
        """
        block, _ = self.run_block(state, anchor, position, heads)
        hidden = block[:, self.first_row : self.first_row + count]
        memory = self.first_memory(anchor[:, None], block[:, :1])
        return self.prepare(hidden), self.choices(self._unembed(hidden, heads)), memory

    def _draft_tree(self, count, state, anchor, position, sampler, heads) -> Proposal:
        """Grows a tree of `count` drafts, by the scores of each node's children given its prefix.

        A smaller tree has the first drafts of a larger one: `count` drafts neither take more than
        as many nodes of a level, nor reach further.
        """
        depth, width = min(self.num_positions, count), min(self.tree.width, count)
        positions = position[:, None] + 1 + jnp.arange(depth)
        pairs = calibration.by_depth(self.calibration, depth)[None] if self.calibration else None
        *inputs, memory = self.run_positions(depth, state, anchor, position, heads)
        rows = *inputs, positions, pairs

        def children(previous, memory, level) -> tuple[Candidates, Any]:
            # All prefixes share the one row of their level.
            prepared, choices, position, pair = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, level, 1, axis=1), rows
            )
            vectors, memory = self.condition(previous, prepared, memory)
            logits, draws = self.correct(choices, vectors, sampler)
            # No more children of a node than the width can be among the best of their level.
            best = draws.candidates(logits, position, width)
            if pair is not None:
                best = best._replace(scores=calibration.log_chances(best.scores, pair))
            return best, memory

        def extend(memory, beam, level):
            def of_parents(x):
                index = beam.parents.reshape(*beam.parents.shape, *(1,) * (x.ndim - 2))
                return jnp.take_along_axis(x, index, axis=1)

            return children(beam.tokens, jax.tree.map(of_parents, memory), level)

        first, memory = children(anchor[:, None], memory, 0)
        memory = jax.tree.map(lambda x: jnp.repeat(x, width, axis=1), memory)
        return beam_tree.grow(first, memory, extend, budget=count, depth=depth)

    def run_conditioned(
        self, batch, heads, key, options, *, anchors=None, remat=False
    ) -> ConditionedRows:
        """Runs blocks across the batch, conditioning each position on the true token before it.

        In decoding, the token before a draft position is the true one up to the first rejection,
        so acceptance lengths equal those of decoding. The arguments are those of `DFlash.loss`.
        """
        anchors = anchors or sample_anchors(batch, options.num_anchors, key)
        blocks, hidden = self.run_drafted(batch, heads, anchors, remat=remat)
        previous = jnp.concatenate([blocks.tokens[..., :1], blocks.labels[..., :-1]], axis=-1)
        anchor_rows, hidden = hidden[:, :, 0], hidden[:, :, self.first_row :]
        vectors = self._condition_all(previous, hidden, anchor_rows)
        return ConditionedRows(blocks, hidden, vectors, previous)

    def score_conditioned(self, rows: ConditionedRows, batch, heads, options) -> TokenScores:
        """Scores the corrected logits, each score [B, A, G]."""
        width = rows.hidden.shape[-1]

        def unembed(x):
            logits = self._unembed(x[..., :width], heads)
            is_target = x.shape[-1] == width  # The target's hidden states have no vectors.
            return logits if is_target else self.corrected(logits, x[..., width:])

        vectors = rows.vectors.astype(rows.hidden.dtype)
        together = jnp.concatenate([rows.hidden, vectors], axis=-1)
        return self.score_drafted(together, rows.blocks, batch, unembed, options, frozen_head=False)

    def _condition_all(self, previous, hidden, anchor_rows) -> jax.Array:
        """Returns the vectors [B, A, G, r] of all draft positions, in a scan over positions."""
        rows, count, drafts, _ = hidden.shape
        inputs = (
            previous.reshape(-1, drafts).swapaxes(0, 1),
            self.prepare(hidden).reshape(rows * count, drafts, -1).swapaxes(0, 1),
        )

        def step(memory, inputs):
            vectors, memory = self.condition(*inputs, memory)
            return memory, vectors

        memory = self.first_memory(inputs[0][0], anchor_rows.reshape(rows * count, -1))
        _, vectors = jax.lax.scan(step, memory, inputs)
        return vectors.swapaxes(0, 1).reshape(rows, count, drafts, -1)

    def score_base(self, rows: ConditionedRows, batch, heads, options) -> TokenScores:
        """Scores the base logits, without the correction."""
        return self._score(rows.hidden, rows.blocks, batch, heads, options)


def fitted(tree: ConditionalTree, depth: int, most_candidates: int) -> ConditionalTree:
    """Returns the tree with all its sizes, for so many levels and tokens per position.

    Raises:
      ConfigError: There are too few candidates, or paths for the budget.
    """
    candidates = tree.candidates or min(_CANDIDATES, most_candidates)
    needed = max(_WIDTH, -(-tree.budget // depth))
    width = tree.width or min(needed, tree.budget, candidates)
    if candidates > most_candidates:
        raise errors.ConfigError(
            f"drafter.tree.candidates: {candidates} exceeds the {most_candidates} tokens that the "
            "drafter has for each position"
        )
    if width > candidates:
        raise errors.ConfigError(
            f"drafter.tree.width: {width} exceeds the {candidates} candidates of each position; "
            "lower it, or raise drafter.tree.candidates"
        )
    if tree.budget > width * depth:
        raise errors.ConfigError(
            f"drafter.tree.budget: {tree.budget} exceeds {width * depth} drafts, width={width} at "
            f"each of {depth} positions; lower it, or raise width or drafter.block_size"
        )
    return ConditionalTree(tree.budget, width, candidates)
