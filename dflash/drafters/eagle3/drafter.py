"""EAGLE-3: a single transformer layer that drafts token by token from the target's features.

Source: arXiv 2503.01840 and its code, SafeAILab/EAGLE. Pair i joins the target's features at
position i with the embedding of token i + 1, is rotated by i, and predicts token i + 2. Where the
target has not computed features yet, the layer's own output replaces them.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.drafters.base import Heads
from dflash.drafters.eagle3 import unrolled
from dflash.drafters.eagle3.layer import EagleLayer
from dflash.drafters.eagle3_config import BeamTree, Eagle3Config, Eagle3Shape
from dflash.drafters.parts import beam_tree, chain, draft_vocabulary
from dflash.drafters.parts.draft_vocabulary import DraftVocabulary
from dflash.drafters.parts.weighted import WeightedDrafter
from dflash.layers import cache as kv
from dflash.layers import rotary
from dflash.layers.linear import Linear, RMSNorm
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3State:
    """State of an EAGLE-3 drafter for B sequences.

    Attributes:
      cache: Keys and values, in one layer, of the pairs before the anchor's position.
      hidden: Output of the last cached pair before the final norm, [B, D]; it predicts the first
        draft.
    """

    cache: kv.StaticCache
    hidden: jax.Array


class Eagle3(WeightedDrafter):
    """EAGLE-3 drafter, with the parameter names of the published checkpoints."""

    hf_architectures = ("LlamaForCausalLMEagle3",)
    shape_class = Eagle3Shape
    option_names = ("num_draft_tokens", "tree", "training_steps")
    has_probs = True
    prefix_cache_mode = "rows"
    rows_ahead = 1
    # Some checkpoints contain a copy of the target's embedding, which this drafter uses instead.
    ignored_checkpoint_names = ("embed_tokens.weight",)

    def __init__(
        self,
        shape: Eagle3Shape,
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
        num_draft_tokens: int = Eagle3Config.num_draft_tokens,
        tree: BeamTree | None = None,
        training_steps: int = Eagle3Config.training_steps,
    ):
        """Builds an abstract drafter.

        Args:
          num_draft_tokens: Number of drafts in a chain.
          tree: Size of the trees to draft; None for chains.
          training_steps: Number of steps for which `loss` feeds the drafter its own output.
        Raises:
          ConfigError: The tree's budget exceeds its capacity.
        """
        super().__init__(shape, dtype=dtype, sharding=sharding)
        decoder, drafted = shape.decoder, shape.draft_vocab_size
        build = {"dtype": dtype, "sharding": sharding}
        self.feature_layers = shape.target_layer_ids or ()
        self.fc = self.feature_projection(shape.num_taps)
        self.midlayer = EagleLayer(decoder, **build)
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps, **build)
        self.lm_head = Linear(decoder.hidden_size, drafted, ("embed", "vocab"), **build)
        self.d2t, self.t2d = draft_vocabulary.declare(drafted, decoder.vocab_size, sharding)
        self.tree = tree
        self.num_draft_tokens = num_draft_tokens if tree is None else tree.budget
        if tree is not None:
            _check_tree(tree, drafted)
        self.training_steps = training_steps

    @property
    def drafts_trees(self) -> bool:
        return self.tree is not None

    @property
    def longest_path(self) -> int:
        """Number of rows on the longest path, anchor included."""
        return 1 + (self.num_draft_tokens if self.tree is None else self.tree.depth)

    def init_state(self, batch: int, max_length: int) -> Eagle3State:
        name, _ = kv.batch_axes(batch, self.sharding)
        width = self.shape.decoder.hidden_size
        hidden = self.sharding.abstract((batch, width), (name, None), self.dtype)
        return Eagle3State(self.context_cache(batch, max_length), hidden)

    def context_pages(self, num_pages, page_size):
        return self.context_cache_pages(num_pages, page_size)

    def read_rows(self, state, slot, start, count):
        return state.cache.read_rows(slot, start, count)

    def write_rows(self, state, slot, start, rows):
        return dataclasses.replace(state, cache=state.cache.write_rows(slot, start, rows))

    def draft(self, state, anchor, position, sampler, heads):
        if self.tree is not None:
            return self._draft_tree(state, position, sampler, heads)
        return self.draft_fewer(self.num_draft_tokens, state, anchor, position, sampler, heads)

    def draft_fewer(self, count, state, anchor, position, sampler, heads):
        """Drafts a shorter chain in fewer steps; see `Drafter.draft_fewer`.

        Keys and values of drafts are written past the committed ones; `observe` overwrites them.
        """
        if self.tree is not None:
            return super().draft_fewer(count, state, anchor, position, sampler, heads)

        def extend(hidden, tokens, cache, step):
            return self.run(hidden, heads.embed(tokens), cache, position + step)

        proposal, cache = chain.draft(
            state.hidden[:, None],
            state.cache,
            position,
            num_draft_tokens=count,
            logits=self.draft_logits,
            extend=extend,
            sampler=sampler.among(self.vocabulary()),
        )
        return proposal, Eagle3State(cache, state.hidden)

    def _draft_tree(self, state, position, sampler, heads):
        """Drafts a tree.

        The rows of all levels share a table of keys and values, and each row attends to its own
        ancestors in it.
        """
        options, sampler = self.tree, sampler.among(self.vocabulary())
        width, batch = options.top_k, position.shape[0]
        over_branches = self.midlayer.attend_branches(state.cache, position)
        size = (options.depth - 1) * width  # Number of extended rows on all levels.

        def candidates(hidden, positions):
            return sampler.candidates(self.draft_logits(hidden), positions, width)

        def extend(carried, beam, level):
            hidden, visible, keys, values = carried
            hidden = jnp.take_along_axis(hidden, beam.parents[..., None], axis=1)
            visible = jnp.take_along_axis(visible, beam.parents[..., None], axis=1)
            begin = (level - 1) * width
            visible |= jnp.arange(size) == begin + jnp.arange(width)[:, None]
            positions = jnp.broadcast_to((position + level - 1)[:, None], (batch, width))
            cos_sin = rotary.angles(positions, self.shape.decoder)

            def attend(queries, new_keys, new_values):
                rows = [
                    jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), begin, axis=1)
                    for old, new in ((keys, new_keys), (values, new_values))
                ]
                return over_branches(queries, *rows, visible), rows

            embedded = heads.embed(beam.tokens)
            hidden, rows = self.midlayer(hidden, embedded, cos_sin, attend)
            # The pair at position p predicts the token at p + 2.
            return candidates(hidden, positions + 2), (hidden, visible, *rows)

        arch = self.shape.decoder
        table = jnp.zeros((batch, size, arch.num_key_value_heads, arch.head_dim), self.dtype)
        hidden = jnp.repeat(state.hidden[:, None], width, axis=1)
        visible = jnp.zeros((batch, width, size), bool)
        first = candidates(state.hidden[:, None], (position + 1)[:, None])
        carried = hidden, visible, table, table
        form = {"budget": options.budget, "depth": options.depth, "with_leaves": True}
        return beam_tree.grow(first, carried, extend, **form), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        embedded = heads.embed(tokens[:, 1:])
        hidden, cache = self.run(self.fc(features), embedded, state.cache, position)
        last = jnp.maximum(num_committed - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        hidden = jnp.where((num_committed > 0)[:, None], newest, state.hidden)
        return Eagle3State(cache, hidden)

    def run(self, features, embedded, cache, start) -> tuple[jax.Array, kv.StaticCache]:
        """Runs the layer over pairs start … start + T - 1, on top of the cached pairs.

        Args:
          features: Target features after `fc`, or earlier outputs of this function, [B, T, D].
          embedded: Embeddings of the tokens that follow, [B, T, D].
          cache: Cache that holds the pairs before `start`.
          start: Index of the first pair, int32 [B].
        Returns:
          hidden [B, T, D] before the final norm, and the cache with the T pairs.
        """
        positions = start[:, None] + jnp.arange(features.shape[1])
        cos_sin = rotary.angles(positions, self.shape.decoder)
        over_context = self.midlayer.attend_context(cache, start)

        def attend(queries, keys, values):
            attended = over_context(queries, keys, values)
            return attended, cache.write(start, (keys,), (values,))

        return self.midlayer(features, embedded, cos_sin, attend)

    def draft_logits(self, hidden: jax.Array, head: Linear | None = None) -> jax.Array:
        """Returns logits float32 [..., Q] over the draft vocabulary.

        Args:
          hidden: Hidden states before the final norm, [..., D].
          head: Gathered copy of the output head, for training; None for the head itself.
        """
        return (head or self.lm_head).attend(self.norm(hidden))

    def check_weights(self, directory: pathlib.Path) -> None:
        """Raises CheckpointError if `d2t` has a token twice, or one that the target lacks."""
        vocab_size = self.shape.decoder.vocab_size
        draft_vocabulary.check(np.asarray(self.d2t.get_value()), vocab_size, directory)

    def vocabulary(self) -> DraftVocabulary:
        """Returns the draft vocabulary of the tables."""
        return DraftVocabulary.of(self.d2t[...], self.shape.decoder.vocab_size)

    def prepare_training(self, count_tokens: Callable[[], np.ndarray], heads: Heads) -> None:
        """Sets the draft vocabulary to the tokens that are labels most often."""
        size = self.shape.draft_vocab_size
        if size < self.shape.decoder.vocab_size:
            parameters.assign_host(self, draft_vocabulary.choose(size, count_tokens))

    def loss(self, batch, heads, key, options, *, remat=False):
        """Computes the loss of EAGLE-3's "training-time test"; see `Drafter.loss`.

        From the second step on, the layer reads its own outputs instead of the target's features.
        `key` is not used.
        """
        hidden = self.unroll(batch, heads, remat=remat)
        head = parameters.gathered(self.lm_head, self.sharding)
        logits = functools.partial(self.draft_logits, head=head)
        scores = unrolled.score_steps(
            hidden, batch, self.vocabulary(), logits, heads.unembed, options
        )
        counted = unrolled.counted_steps(batch, self.training_steps)
        return unrolled.unrolled_loss(scores, counted, options)

    def unroll(self, batch, heads, *, remat=False) -> list[jax.Array]:
        """Returns the outputs of all steps, each [B, T, D] before the final norm.

        Features and embeddings are converted to the dtype of this module's weights.
        """
        dtype = self.fc.kernel.dtype
        x = self.fc(batch.features.astype(dtype))
        outputs, pairs = [], []
        for step in range(self.training_steps):
            embedded = heads.embed(unrolled.shift(batch.tokens, step + 1)).astype(dtype)
            cos_sin = rotary.angles(batch.positions + step, self.shape.decoder)

            def run(x, embedded, cos_sin, pairs):
                attend = self.midlayer.attend_steps(pairs, batch.segment_ids)
                return self.midlayer(x, embedded, cos_sin, attend)

            x, pair = (jax.checkpoint(run) if remat else run)(x, embedded, cos_sin, pairs)
            outputs.append(x)
            pairs = [*pairs, pair]
        return outputs

    @staticmethod
    def checkpoint_name(path: str) -> str:
        stem, _, _ = path.rpartition(".")
        return f"{stem}.weight" if stem else path


def _check_tree(tree: BeamTree, vocab_size: int) -> None:
    """Raises ConfigError if a draft vocabulary of this size is too small for the tree."""
    if tree.top_k > vocab_size:
        raise errors.ConfigError(
            f"drafter.tree.top_k: {tree.top_k} exceeds the draft vocabulary of {vocab_size} tokens"
        )
    capacity = tree.top_k + (tree.depth - 1) * tree.top_k**2
    if tree.budget > capacity:
        raise errors.ConfigError(
            f"drafter.tree.budget: {tree.budget} exceeds the tree's capacity of {capacity} drafts "
            f"with top_k={tree.top_k} and depth={tree.depth}; lower budget, or raise top_k or depth"
        )
