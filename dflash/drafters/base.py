"""Interface between the decode loop and a drafting strategy.

A drafter is an nnx module with static `feature_layers` and `num_draft_tokens`. Its state is a
pytree that the loop carries and never inspects. The loop calls `draft` once per cycle and, after
verification, `observe` with the committed rows. Prompts also reach the drafter through `observe`,
so all context enters by the same method.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.config.schema import DrafterConfig, TargetArchitecture
from dflash.config.train_schema import LossConfig
from dflash.drafters.parts.sampler import Sampler
from dflash.layers.losses import TrainBatch
from dflash.parallel.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafted tokens: a chain, or a tree rooted at the anchor.

    Rows of the verified block are numbered with the anchor as row 0 and draft g as row g + 1.

    Attributes:
      tokens: int32 [B, G]; drafted tokens.
      parents: int32 [B, G] or None; the row that draft g continues, parents[b, g] <= g. None means
        a chain, in which draft g continues row g. Children of the same row must be different
        tokens.
      probs: float32 [B, Q, V] or None; distributions that the tokens were drawn from, for rejection
        verification. Siblings are drawn from the same distribution without replacement, in the
        order of g.
      drawn_from: int32 [B, G] or None; row of `probs` that draft g was drawn from. None means that
        Q = G and draft g was drawn from row g. The number of children of a row must not depend on
        the drawn tokens.
      confidence: float32 [B, G] or None; the drafter's own estimate of the probability that each
        draft is accepted, in a chain given that all drafts before it are.
    """

    tokens: jax.Array
    parents: jax.Array | None = None
    probs: jax.Array | None = None
    drawn_from: jax.Array | None = None
    confidence: jax.Array | None = None

    def first(self, count: int) -> "Proposal":
        """Returns the first `count` drafts, which form a tree if all of them do."""
        probs = self.probs
        if probs is not None and self.drawn_from is None:
            probs = probs[:, :count]
        cut = jax.tree.map(lambda x: x[:, :count], dataclasses.replace(self, probs=None))
        return dataclasses.replace(cut, probs=probs)


class Heads(Protocol):
    """Embedding and output head of the target, which a drafter may use."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings [B, T, D] of tokens int32 [B, T]."""

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Returns logits float32 [B, T, V] of hidden states [B, T, D] after a final norm."""

    def table_rows(self, tokens: jax.Array) -> jax.Array:
        """Returns the rows of the embedding table as they are stored."""

    def head_products(self, hidden: jax.Array) -> jax.Array:
        """Returns the products with the output head, without a factor or bound of the target's."""

    def head_columns(self, tokens: np.ndarray) -> jax.Array:
        """Returns the columns [D, Q] of the output head for `tokens` int [Q]."""


class Drafter(nnx.Module):
    """Base class of all strategies; the module docstring describes the contract.

    Attributes:
      hf_architectures: Entries of `architectures` in config.json that select this class.
      feature_layers: Target layers whose outputs `observe` receives, concatenated.
      num_draft_tokens: Number of tokens in every proposal, G.
      has_probs: Proposals have probabilities if verification needs them.
      drafts_with_model: The drafter is a language model of its own; `create` then also takes
        `family`, the class of that model.
      prefix_cache_mode: How the state of a cached prefix is restored without running the target
        over it. At least one more token is observed afterwards.
        "rows": From the rows that `read_rows` returned for the prefix. The next `observe` rebuilds
          the rest of the state.
        "tokens": By observing the prefix's tokens again, with features of zeros, which must have no
          effect.
        "never": Not at all. The prefix cache then has no hits for this strategy.
      rows_ahead: Number of tokens after its own position that a row depends on.
      longest_context: Length from which sequences are better decoded plainly; None if there is
        none. It has an effect where the rows of cycles are chosen.
      windows: Windows of the context that are chosen from for each sequence, ascending, beside the
        whole context; see `within`. Empty for no choice.
      exports_tables: Checkpoints that training exports have what `tabulate` leaves.
    """

    hf_architectures: ClassVar[tuple[str, ...]] = ()
    feature_layers: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    has_probs: bool = False
    drafts_with_model: ClassVar[bool] = False
    prefix_cache_mode: ClassVar[Literal["rows", "tokens", "never"]] = "never"
    rows_ahead: ClassVar[int] = 0
    longest_context: int | None = None
    windows: tuple[int, ...] = ()
    exports_tables: bool = True

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
        """Creates an abstract drafter for a target.

        The default calls the constructor without arguments.

        Args:
          config: Config group `drafter` of the run, of the strategy's registered schema.
          hf: Contents of the checkpoint's config.json; None for random weights or no weights.
          target: Architecture of the target.
          dtype: Dtype of weights and state.
          sharding: Mesh and axis rules of weights and state.
        Raises:
          CheckpointError: The checkpoint was trained for another target.
          ConfigError: This drafter does not support one of the options.
        """
        return cls()

    def prepare_training(self, count_tokens: Callable[[], np.ndarray], heads: Heads) -> None:
        """Sets the parameters that follow from the data and the target.

        Called once, before training from scratch. The default does nothing.

        Args:
          count_tokens: () -> int64 [V]; the number of times that each token is a label in the data.
            Call it only if needed, since it is expensive; it always returns the same counts.
          heads: Embedding and output head of the target, with weights.
        """

    def tabulate(self, heads: Heads) -> None:
        """Replaces networks that only depend on a token by tables of their outputs, in place.

        Called before drafting, once the weights are loaded, and for a plan with abstract weights.
        The default does nothing.

        Args:
          heads: Embedding and output head of the target, with weights unless these are abstract.
        """

    @property
    def block_size(self) -> int:
        """Number of rows that the target verifies: the anchor and the drafted tokens."""
        return self.num_draft_tokens + 1

    @property
    def longest_path(self) -> int:
        """Rows on the longest path, anchor included, which limit the tokens per cycle."""
        return self.block_size

    @property
    def drafts_trees(self) -> bool:
        """Returns whether proposals name parents."""
        return self.longest_path < self.block_size

    @property
    def has_confidence(self) -> bool:
        """Returns whether proposals state confidence, as those of trees do unless overridden."""
        return self.drafts_trees

    def init_state(self, batch: int, max_length: int) -> Any:
        """Returns an abstract state for `batch` sequences of at most `max_length` tokens.

        The state is a pytree of `jax.ShapeDtypeStruct` with shardings. Every sequence starts with
        all zeros.
        """
        raise TypeError(f"{type(self).__name__} must define init_state")

    def draft(
        self, state: Any, anchor: jax.Array, position: jax.Array, sampler: Sampler, heads: Heads
    ) -> tuple[Proposal, Any]:
        """Proposes continuations of each anchor, and returns them with the new state.

        Args:
          state: State that covers exactly the positions before the anchors.
          anchor: Last committed tokens, int32 [B].
          position: Positions of the anchors, int32 [B].
          sampler: Draws tokens; its noise is a function of the absolute position.
          heads: Embedding and output head of the target.
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
        """Proposes `count` tokens, 0 < count < num_draft_tokens; otherwise the same as `draft`.

        The default computes the whole draft, and keeps its first tokens. Override it if a shorter
        draft costs less. Drafts of a tree should be ordered by their chance of acceptance: cycles
        whose rows are chosen verify the first ones.
        """
        proposal, state = self.draft(state, anchor, position, sampler, heads)
        return proposal.first(count), state

    def review(self, state: Any, proposal: Proposal, sampled: jax.Array) -> Any:
        """Updates the state with the target's token after every row, rejected rows included.

        Called between verification and `observe` if verification draws a token after every row, as
        the coupled rule does. A state that uses these tokens no longer follows from the committed
        tokens alone. The default does nothing.

        Args:
          state: State that `draft` returned.
          proposal: Verified proposal, with -1 in place of drafts that had no row.
          sampled: Tokens that the target draws after the anchor and after each draft, int32 [B, R].
        Returns:
          The state, still covering the positions before the anchor.
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
        """Adds committed rows to the state.

        Rows past `num_committed` are arbitrary and must be ignored.

        Args:
          state: State that covers exactly the positions before `position`.
          position: Position of the first row, int32 [B].
          tokens: int32 [B, T + 1]; row i holds tokens[:, i] and is followed by tokens[:, i + 1].
          num_committed: Number of committed rows, int32 [B], in [0, T].
          features: Features of the rows, [B, T, C·D].
          heads: Embedding and output head of the target.
        Returns:
          The state, covering the positions before position + num_committed.
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
        """Computes the training loss, whose gradients are those of the drafter's parameters.

        Args:
          batch: Packed rows, with the features of `feature_layers`.
          heads: Embedding and output head of the target, which are frozen.
          key: PRNG key.
          options: Config group of the loss.
          remat: Recompute activations in the backward pass.
        Returns:
          loss float32 [], and metrics, each float32 []. Among them is "weight", the divisor of the
          loss, which weights the parts of a batch when they are averaged.
        Raises:
          ValueError: The batch lacks an array that the loss needs.
        """
        raise TypeError(f"{type(self).__name__} has nothing to train")

    def within(self, windows: jax.Array) -> "Drafter":
        """Returns this drafter, which drafts from the last positions of each context.

        Args:
          windows: int32 [B]; number of positions that the anchor's row sees, its own included. The
            context of each later row begins one position later.
        """
        raise TypeError(f"{type(self).__name__} has no windows")

    def clear(self, state: Any, fresh: jax.Array) -> Any:
        """Returns the state with zeros for the sequences that are `fresh`, bool [B].

        The default requires that every leaf of the state has shape [B, …].
        """

        def put(leaf):
            return jnp.where(fresh.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.zeros_like(leaf), leaf)

        return jax.tree.map(put, state)

    def insert(self, state: Any, other: Any, row: jax.Array, slot: jax.Array) -> Any:
        """Copies sequence `row` of another state into slot `slot` of the batch's state.

        The default requires that every leaf of both states has shape [B, …], and that the other
        state's remaining dimensions are at most as large.
        """

        def put(batch_leaf, leaf):
            sequence = jax.lax.dynamic_slice_in_dim(leaf, row, 1)
            start = (slot,) + (jnp.int32(0),) * (leaf.ndim - 1)
            return jax.lax.dynamic_update_slice(batch_leaf, sequence, start)

        return jax.tree.map(put, state, other)

    def learnt(self, state: Any) -> Any:
        """Returns what the state knows about all sequences, for another run to start with."""
        return ()

    def with_learnt(self, state: Any, learnt: Any) -> Any:
        """Returns the state with what `learnt` returned for a state of the same shapes."""
        return state

    # --- Rows of the state in a prefix cache; see `prefix_cache_mode` ----------------------------

    def context_pages(self, num_pages: int, page_size: int) -> Any:
        """Returns abstract pages of rows, a pytree of [P, …] that is sharded by "pages"."""
        return ()

    def read_rows(self, state: Any, slot: jax.Array, start: jax.Array, count: int) -> Any:
        """Returns the rows of `count` positions of a slot, in the layout of `context_pages`."""
        return ()

    def write_rows(self, state: Any, slot: jax.Array, start: jax.Array, rows: Any) -> Any:
        """Returns the state with rows that `read_rows` returned for the same positions."""
        return state
