"""The seam between the decode loop and a drafting strategy.

A drafter is an nnx module with static `feature_layers` and `num_draft_tokens`, and a state: a
pytree that the loop carries and never inspects. The loop calls `draft` once a cycle and, after
verification, `observe` with the committed rows. A prompt reaches the drafter through `observe` too,
so there is one way in for context.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.config.loss_schema import LossConfig
from dflash.config.schema import DrafterConfig, TargetArchitecture
from dflash.drafters.parts.draft_vocabulary import DraftTokens
from dflash.layers.train_batch import TrainBatch
from dflash.parallel.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafted tokens: a chain, or a tree rooted at the anchor.

    Rows of the verified block are numbered with the anchor as row 0 and draft g as row g + 1.

    Attributes:
      tokens: int32 [B, G].
      parents: int32 [B, G] or None; the row that draft g continues, parents[b, g] <= g. None: a
        chain, in which draft g continues row g. Children of one row must differ in their token.
      probs: float32 [B, Q, V] or None; the distributions that tokens were drawn from, for rejection
        verification. Siblings are drawn from one of them without replacement, in the order of g.
      drawn_from: int32 [B, G] or None; row of `probs` that draft g was drawn from. None: Q = G, and
        draft g was drawn from row g. How many children a row has must not depend on what was drawn.
    """

    tokens: jax.Array
    parents: jax.Array | None = None
    probs: jax.Array | None = None
    drawn_from: jax.Array | None = None

    def first(self, count: int) -> "Proposal":
        """The first `count` tokens of a chain.

        Raises:
          ValueError: it is a tree.
        """
        if self.parents is not None:
            raise ValueError("only a chain has first tokens; a tree has to be drafted smaller")
        probs = None if self.probs is None else self.probs[:, :count]
        return Proposal(self.tokens[:, :count], probs=probs)


class Candidates(NamedTuple):
    """The k likeliest tokens of each position, the best first.

    Attributes:
      tokens: int32 [B, T, k]; distinct within a position.
      scores: float32 [B, T, k], descending and at most 0; log-probability that verification accepts
        the token there.
      probs: float32 [B, T, V] or None; what `tokens` were drawn from, one after the other and
        without replacement, where verification asks for it. `scores` then do not depend on what was
        drawn.
    """

    tokens: jax.Array
    scores: jax.Array
    probs: jax.Array | None


class Sampler(Protocol):
    """Draws tokens under each sequence's temperature, top-k, top-p and noise."""

    def propose(
        self, logits: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Draws the tokens at `positions` int32 [B, T] from logits float32 [B, T, V].

        Returns tokens int32 [B, T], and the probabilities [B, T, V] that they were drawn with
        where verification asks for them, else None.
        """

    def candidates(self, logits: jax.Array, positions: jax.Array, count: int) -> Candidates:
        """The `count` best tokens at `positions` int32 [B, T], for a tree; see `Candidates`.

        Args: logits: float32 [B, T, V], of which count is at most V.
        """

    def among(self, vocabulary: DraftTokens) -> "Sampler":
        """This sampler for logits [B, T, Q] of a draft vocabulary; it draws the target's tokens.

        It draws what it would draw from logits over all V tokens that are -inf elsewhere.
        """


class Heads(Protocol):
    """The target's embedding and output head, which a drafter may use."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [B, T] -> [B, T, D]."""

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """[B, T, D] -> float32 logits [B, T, V]."""

    def head_columns(self, tokens: np.ndarray) -> jax.Array:
        """Columns [D, Q] of the output head: those of `tokens` int [Q]."""


class Drafter(nnx.Module):
    """Base of all strategies; see the module's docstring for the contract.

    Attributes:
      feature_layers: target layers whose outputs `observe` receives, concatenated.
      num_draft_tokens: G, the number of tokens in every proposal.
      has_probs: proposals bring probabilities where verification asks for them.
      drafts_with_model: The drafter is a language model of its own; `create` then also takes
        `family`, the class of that model.
      prefix_cache_mode: how the state of a prefix comes back without running the target
        over it, given that at least one more token is observed then.
        "rows": from what `read_rows` returned for its positions. The rest of the state is made anew
          by the next `observe`.
        "tokens": by observing its tokens again; features are zeros, and must not matter.
        "never": not at all, so that no prompt of this strategy is found in a prefix cache.
      rows_ahead: tokens after its own position that a row depends on.
    """

    hf_architectures: ClassVar[tuple[str, ...]] = ()
    feature_layers: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    has_probs: bool = False
    drafts_with_model: ClassVar[bool] = False
    prefix_cache_mode: ClassVar[Literal["rows", "tokens", "never"]] = "never"
    rows_ahead: ClassVar[int] = 0

    @classmethod
    def create(
        cls,
        config: DrafterConfig,
        hf: Mapping[str, Any] | None,
        target: TargetArchitecture,
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
    ) -> "Drafter":
        """An abstract drafter for a target; the default serves strategies without weights.

        Args:
          config: the run's drafter group, of the schema registered with the strategy.
          hf: the checkpoint's config.json; None for random weights, or if there are none.
          target: shape of the target.
          dtype: of weights and state.
          sharding: where they live.
        Raises:
          CheckpointError: the checkpoint was trained for another target.
          ConfigError: an option that this drafter cannot serve.
        """
        return cls()

    def prepare_training(self, count_tokens: Callable[[], np.ndarray], heads: Heads) -> None:
        """Called before training from scratch, for what follows from the data and the target.

        Args:
          count_tokens: () -> int64 [V]; how often each token is a label in the data. Expensive, so
            call it only if needed; the result is always the same.
          heads: the target's embedding and output head, with weights.
        """

    @property
    def block_size(self) -> int:
        """Rows that the target verifies: the anchor and the drafted tokens."""
        return self.num_draft_tokens + 1

    @property
    def longest_path(self) -> int:
        """Rows of the longest path, anchor included: the most tokens that a cycle commits."""
        return self.block_size

    def init_state(self, batch: int, max_length: int) -> Any:
        """Abstract state for `batch` sequences of at most `max_length` tokens.

        A pytree of jax.ShapeDtypeStruct with shardings. Every sequence starts with all zeros.
        """
        raise TypeError(f"{type(self).__name__} must define init_state")

    def draft(
        self, state: Any, anchor: jax.Array, position: jax.Array, sampler: Sampler, heads: Heads
    ) -> tuple[Proposal, Any]:
        """Proposes what follows each anchor.

        Args:
          state: covers exactly the positions before the anchors.
          anchor: int32 [B]; last committed token.
          position: int32 [B]; its position.
          sampler: draws tokens; its noise belongs to absolute positions.
          heads: the target's embedding and output head.
        """
        raise TypeError(f"{type(self).__name__} must define draft")

    def draft_fewer(
        self,
        count: int,
        state: Any,
        anchor: jax.Array,
        position: jax.Array,
        sampler: Sampler,
        heads: Heads,
    ) -> tuple[Proposal, Any]:
        """Proposes `count` tokens, 0 < count < num_draft_tokens; else as `draft`.

        The default makes the whole draft and keeps its first tokens. Override it where a shorter
        draft costs less.
        """
        proposal, state = self.draft(state, anchor, position, sampler, heads)
        return proposal.first(count), state

    def review(self, state: Any, proposal: Proposal, sampled: jax.Array) -> Any:
        """Learns from the target's token after every row, refused ones included.

        By default it does nothing. Called between verification and `observe`, if verification draws
        a token after every row, as the coupled rule does. What is learned here does not follow from
        the committed text alone.

        Args:
          state: as `draft` returned it.
          proposal: what was verified.
          sampled: int32 [B, R]; the target's own token after the anchor and after each draft.
        Returns:
          the state, still covering the positions before the anchor.
        """
        return state

    def observe(
        self,
        state: Any,
        position: jax.Array,
        tokens: jax.Array,
        num_committed: jax.Array,
        features: jax.Array,
        heads: Heads,
    ) -> Any:
        """Observes committed rows; rows past `num_committed` are arbitrary and must be ignored.

        Args:
          state: covers exactly the positions before `position`.
          position: int32 [B]; of the first row.
          tokens: int32 [B, T + 1]; row i holds tokens[:, i] and is followed by tokens[:, i + 1].
          num_committed: int32 [B], in [0, T].
          features: [B, T, C·D]; of the rows.
          heads: the target's embedding and output head.
        Returns:
          the state, covering the positions before position + num_committed.
        """
        raise TypeError(f"{type(self).__name__} must define observe")

    def loss(
        self,
        batch: TrainBatch,
        heads: Heads,
        key: jax.Array,
        options: LossConfig,
        *,
        remat: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The training loss; gradients are taken with respect to the drafter alone.

        Args:
          batch: packed rows, with the features of `feature_layers`.
          heads: the target's embedding and output head; frozen.
          key: PRNG key.
          options: the config of the loss.
          remat: recompute activations in the backward pass.
        Returns:
          loss float32 [], and metrics, each float32 []. Among them are "acceptance_length", the
          mean number of tokens that a cycle would commit, and "weight", the divisor of the loss,
          by which pieces of a batch are averaged.
        Raises:
          ValueError: the batch lacks an array that the loss needs.
        """
        raise TypeError(f"{type(self).__name__} has nothing to train")

    def clear(self, state: Any, fresh: jax.Array) -> Any:
        """The state with zeros for the sequences that are `fresh`, bool [B].

        The default requires that every leaf of the state is [B, …].
        """

        def put(leaf):
            return jnp.where(fresh.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.zeros_like(leaf), leaf)

        return jax.tree.map(put, state)

    def insert(self, state: Any, other: Any, row: jax.Array, slot: jax.Array) -> Any:
        """Puts sequence `row` of another state into slot `slot` of the batch's state.

        The default requires that every leaf of the state is [B, …], of the same or smaller
        remaining dimensions in the other one.
        """

        def put(batch_leaf, leaf):
            one = jax.lax.dynamic_slice_in_dim(leaf, row, 1)
            where = (slot,) + (jnp.int32(0),) * (leaf.ndim - 1)
            return jax.lax.dynamic_update_slice(batch_leaf, one, where)

        return jax.tree.map(put, state, other)

    # --- what a prefix cache keeps of the state; see `restores` ---------------------------------

    def context_pages(self, num_pages: int, page_size: int) -> Any:
        """Abstract pages for rows of the state: a pytree of [P, …], sharded by "pages"."""
        return ()

    def read_rows(self, state: Any, slot: jax.Array, start: jax.Array, count: int) -> Any:
        """The rows of `count` positions of a slot: an entry of each leaf of `context_pages`."""
        return ()

    def write_rows(self, state: Any, slot: jax.Array, start: jax.Array, rows: Any) -> Any:
        """The state with the rows that `read_rows` has returned for the same positions."""
        return state
