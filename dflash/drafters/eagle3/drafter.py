"""EAGLE-3: one or a few transformer layers that draft token by token from the target's features.

Source: arXiv 2503.01840 and its code, SafeAILab/EAGLE; further norms, layers and P-EAGLE by
vllm-project/speculators. Pair i joins the target's features at position i with the embedding of
token i + 1, is rotated by i, and predicts token i + 2. Where the target has not computed features
yet, the layers' own output replaces them.

P-EAGLE (arXiv 2602.01469) drafts in one pass. The pairs after the last one with features hold the
embedding of a mask token, and a learned vector in place of features.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.drafters.base import Heads, Proposal
from dflash.drafters.eagle3 import unrolled
from dflash.drafters.eagle3.layer import DraftLayer, EagleLayer, make_layer
from dflash.drafters.eagle3_config import BeamTree, Eagle3Config, Eagle3Shape
from dflash.drafters.parts import beam_tree, chain, draft_vocabulary
from dflash.drafters.parts.draft_vocabulary import DraftVocabulary
from dflash.drafters.parts.sampler import Sampler
from dflash.drafters.parts.weighted import WeightedDrafter
from dflash.layers import cache as kv
from dflash.layers import rotary
from dflash.layers.linear import Embedding, Linear, RMSNorm
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3State:
    """State of an EAGLE-3 drafter for B sequences.

    Attributes:
      cache: Keys and values of the pairs before the anchor's position.
      hidden: Output of the last cached pair, as it is fed back, [B, D]; it predicts the first
        draft.
    """

    cache: kv.StaticCache
    hidden: jax.Array


class Eagle3(WeightedDrafter):
    """EAGLE-3 or P-EAGLE drafter."""

    hf_architectures = (
        *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3"),
        *("Eagle3DraftModel", "Eagle3Speculator", "PEagleDraftModel", "PEagleSpeculator"),
    )
    shape_class = Eagle3Shape
    option_names = ("num_draft_tokens", "tree", "training_steps")
    has_probs = True
    prefix_cache_mode = "rows"
    rows_ahead = 1

    def __init__(
        self,
        shape: Eagle3Shape,
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
        num_draft_tokens: int | None = None,
        tree: BeamTree | None = None,
        training_steps: int = Eagle3Config.training_steps,
    ):
        """Builds an abstract drafter.

        Args:
          num_draft_tokens: Number of drafts in a chain; None for that of the shape.
          tree: Size of the trees to draft; None for chains.
          training_steps: Number of steps for which `loss` feeds the drafter its own output.
        Raises:
          ConfigError: The drafter draws no trees, or the tree's budget exceeds its capacity.
        """
        super().__init__(shape, dtype=dtype, sharding=sharding)
        decoder, drafted = shape.decoder, shape.draft_vocab_size
        width, eps = decoder.hidden_size, decoder.rms_norm_eps
        build = {"dtype": dtype, "sharding": sharding}
        self.feature_layers = shape.target_layer_ids or ()
        self._declare_inputs(**build)
        self.midlayer = EagleLayer(shape, **build)
        self.layers = nnx.List(
            make_layer(shape, i, **build) for i in range(1, decoder.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps, **build)
        self.lm_head = Linear(width, drafted, ("embed", "vocab"), **build)
        tables = None, None
        if shape.has_draft_vocabulary:
            tables = draft_vocabulary.declare(drafted, decoder.vocab_size, sharding)
        self.d2t, self.t2d = tables
        self.tree = tree
        self.num_draft_tokens = tree.budget if tree else num_draft_tokens or shape.num_drafts
        if tree is not None:
            _check_tree(tree, shape)
        self.training_steps = training_steps

    def _declare_inputs(self, **build) -> None:
        """Declares what turns features and tokens into inputs of the first layer."""
        shape, taps = self.shape, self.shape.num_taps
        width, eps = shape.decoder.hidden_size, shape.decoder.rms_norm_eps
        tap = shape.target_hidden_size or width
        self.fc = self.feature_projection(taps)
        self.input_norm = RMSNorm(taps * tap, eps, **build) if shape.norm_before_fc else None
        count = taps if shape.fc_norm else 0
        self.fc_norm = nnx.List(RMSNorm(tap, eps, **build) for _ in range(count))
        vocab_size, is_parallel = shape.decoder.vocab_size, shape.mask_token_id is not None
        self.embed_tokens = Embedding(vocab_size, width, **build) if shape.has_embedding else None
        axes = {"axes": (None, None, None), "stddev": 1.0}
        self.mask_hidden = (
            parameters.declare((1, 1, taps * tap), **axes, **build) if is_parallel else None
        )

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Names of tensors that repeat the target's weights, or a whole vocabulary."""
        modules = {"embed_tokens.weight": self.embed_tokens, "d2t": self.d2t, "t2d": self.t2d}
        copies = [name for name, module in modules.items() if module is None]
        return (*copies, "verifier_norm.weight", "verifier_lm_head.weight")

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
        if self.mask_hidden is not None:
            return self._draft_at_once(count, state, position, sampler, heads)

        def extend(hidden, tokens, cache, step):
            return self.run(hidden, self.embed(tokens, heads), cache, position + step)

        proposal, cache = chain.draft(
            state.hidden[:, None],
            state.cache,
            position,
            num_draft_tokens=count,
            logits=self.draft_logits,
            extend=extend,
            sampler=self.among(sampler),
        )
        return proposal, Eagle3State(cache, state.hidden)

    def _draft_at_once(self, count, state, position, sampler, heads):
        """Drafts a chain of P-EAGLE; the first draft follows from the last observed pair."""
        hidden = state.hidden[:, None]
        if count > 1:
            batch = position.shape[0]
            masks = jnp.full((batch, count - 1), self.shape.mask_token_id)
            features = self.project(self.mask_hidden[...])
            features = jnp.broadcast_to(features, (*masks.shape, features.shape[-1]))
            rows, _ = self.run(features, self.embed(masks, heads), state.cache, position)
            hidden = jnp.concatenate([hidden, rows], axis=1)
        positions = position[:, None] + 1 + jnp.arange(count)
        tokens, probs = self.among(sampler).propose(self.draft_logits(hidden), positions)
        return Proposal(tokens, probs=probs), state

    def _draft_tree(self, state, position, sampler, heads):
        """Drafts a tree.

        The rows of all levels share a table of keys and values, and each row attends to its own
        ancestors in it.
        """
        options, sampler = self.tree, self.among(sampler)
        width, batch = options.top_k, position.shape[0]
        over_branches = [
            layer.attend_branches(cached, position)
            for layer, cached in zip(self.all_layers, state.cache.by_layer, strict=True)
        ]
        size = (options.depth - 1) * width  # Number of extended rows on all levels.

        def candidates(hidden, positions):
            return sampler.candidates(self.draft_logits(hidden), positions, width)

        def extend(carried, beam, level):
            hidden, visible, tables = carried
            hidden = jnp.take_along_axis(hidden, beam.parents[..., None], axis=1)
            visible = jnp.take_along_axis(visible, beam.parents[..., None], axis=1)
            begin = (level - 1) * width
            visible |= jnp.arange(size) == begin + jnp.arange(width)[:, None]
            positions = jnp.broadcast_to((position + level - 1)[:, None], (batch, width))

            def attend_with(over_branches, table):
                def attend(queries, *pair):
                    rows = [
                        jax.lax.dynamic_update_slice_in_dim(
                            old, new.astype(old.dtype), begin, axis=1
                        )
                        for old, new in zip(table, pair, strict=True)
                    ]
                    return over_branches(queries, *rows, visible), rows

                return attend

            attends = map(attend_with, over_branches, tables)
            embedded = self.embed(beam.tokens, heads)
            hidden, tables = self._run_layers(hidden, embedded, positions, attends)
            # The pair at position p predicts the token at p + 2.
            return candidates(hidden, positions + 2), (hidden, visible, tables)

        arch = self.shape.decoder
        table = jnp.zeros((batch, size, arch.num_key_value_heads, arch.head_dim), self.dtype)
        hidden = jnp.repeat(state.hidden[:, None], width, axis=1)
        visible = jnp.zeros((batch, width, size), bool)
        first = candidates(state.hidden[:, None], (position + 1)[:, None])
        carried = hidden, visible, [[table, table] for _ in self.all_layers]
        form = {"budget": options.budget, "depth": options.depth, "with_leaves": True}
        return beam_tree.grow(first, carried, extend, **form), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        embedded = self.embed(tokens[:, 1:], heads)
        hidden, cache = self.run(self.project(features), embedded, state.cache, position)
        last = jnp.maximum(num_committed - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        hidden = jnp.where((num_committed > 0)[:, None], newest, state.hidden)
        return Eagle3State(cache, hidden)

    def run(self, features, embedded, cache, start) -> tuple[jax.Array, kv.StaticCache]:
        """Runs the layers over pairs start … start + T - 1, on top of the cached pairs.

        Args:
          features: Output of `project`, or earlier outputs of this function, [B, T, D].
          embedded: Embeddings of the tokens that follow, [B, T, D].
          cache: Cache that holds the pairs before `start`.
          start: Index of the first pair, int32 [B].
        Returns:
          hidden [B, T, D], as it is fed back, and the cache with the T pairs.
        """
        positions = start[:, None] + jnp.arange(features.shape[1])

        def attend_after(layer, cached):
            over_context = layer.attend_context(cached, start)
            return lambda *rows: (over_context(*rows), rows[1:])

        attends = map(attend_after, self.all_layers, cache.by_layer)
        hidden, pairs = self._run_layers(features, embedded, positions, attends)
        return hidden, cache.write(start, *zip(*pairs, strict=True))

    def _run_layers(self, features, embedded, positions, attends) -> tuple[jax.Array, list]:
        """Returns the outputs of pairs [B, T, D], and the other result of each `attends`."""
        cos_sin = rotary.angles(positions, self.shape.rotary)
        x, results = (features, embedded), []
        for layer, attend in zip(self.all_layers, attends, strict=True):
            x, result = layer(x, cos_sin, attend)
            results.append(result)
        return self.norm(x) if self.shape.norm_output else x, results

    @property
    def all_layers(self) -> list[DraftLayer]:
        """Layers in the order in which they run."""
        return [self.midlayer, *self.layers]

    def project(self, features: jax.Array) -> jax.Array:
        """Projects the target's features [..., C·D] to the drafter's width."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            taps = jnp.split(features, len(self.fc_norm), axis=-1)
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        return self.fc(features)

    def embed(self, tokens: jax.Array, heads: Heads) -> jax.Array:
        """Returns embeddings [B, T, D]; of a target's only the rows, without its factor."""
        return (heads.table_rows if self.embed_tokens is None else self.embed_tokens)(tokens)

    def draft_logits(self, hidden: jax.Array, head: Linear | None = None) -> jax.Array:
        """Returns logits float32 [..., Q] over the draft vocabulary.

        Args:
          hidden: Outputs of `run`, [..., D].
          head: Gathered copy of the output head, for training; None for the head itself.
        """
        normed = hidden if self.shape.norm_output else self.norm(hidden)
        return (head or self.lm_head).attend(normed)

    def check_weights(self, directory: pathlib.Path) -> None:
        """Raises CheckpointError if `d2t` has a token twice, or one that the target lacks."""
        if self.d2t is not None:
            table = np.asarray(self.d2t.get_value())
            draft_vocabulary.check(table, self.shape.decoder.vocab_size, directory)

    def among(self, sampler: Sampler) -> Sampler:
        """Returns a sampler over the draft vocabulary, or the same one if there is none."""
        return sampler if self.d2t is None else sampler.among(self.vocabulary())

    def vocabulary(self) -> DraftVocabulary:
        """Returns the draft vocabulary of the tables, or that of all tokens."""
        size = self.shape.decoder.vocab_size
        table = jnp.zeros(size, jnp.int32) if self.d2t is None else self.d2t[...]
        return DraftVocabulary.of(table, size)

    def prepare_training(self, count_tokens: Callable[[], np.ndarray], heads: Heads) -> None:
        """Sets the draft vocabulary to the tokens that are labels most often."""
        if self.d2t is not None:
            size = self.shape.draft_vocab_size
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
        """Returns the outputs of all steps, each [B, T, D] as it is fed back.

        Features and embeddings are converted to the dtype of this module's weights.

        Raises:
          ConfigError: The drafter has layers with a window, or drafts in one pass.
        """
        if self.mask_hidden is not None or any(self.shape.layer_windows):
            what = "layer_types: sliding" if self.mask_hidden is None else "mask_token_id: P-EAGLE"
            raise errors.ConfigError(f"drafter.checkpoint: config.json: {what} is not trained here")
        dtype = self.fc.kernel.dtype
        x = self.project(batch.features.astype(dtype))
        outputs, steps = [], []
        for step in range(self.training_steps):
            following = unrolled.shift(batch.tokens, step + 1)
            embedded = self.embed(following, heads).astype(dtype)
            positions = batch.positions + step

            def run(x, embedded, positions, steps):
                attends = [
                    layer.attend_steps([pairs[i] for pairs in steps], batch.segment_ids)
                    for i, layer in enumerate(self.all_layers)
                ]
                return self._run_layers(x, embedded, positions, attends)

            x, pairs = (jax.checkpoint(run) if remat else run)(x, embedded, positions, steps)
            outputs.append(x)
            steps = [*steps, pairs]
        return outputs

    def checkpoint_name(self, path: str) -> str:
        stem, _, leaf = path.rpartition(".")
        name = path if leaf == "bias" or not stem else f"{stem}.weight"
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            return f"layers.{int(number) + 1}.{rest}"
        return self.known_name(name)

    def known_name(self, name: str) -> str:
        """Returns the name in this layout of a tensor that files of others may name otherwise."""
        is_only = self.shape.layout == "eagle" and not self.layers
        name = name.removeprefix("model.")
        for first in ("midlayer.", "layers.0."):
            if name.startswith(first):
                return f"{'midlayer.' if is_only else 'layers.0.'}{name.removeprefix(first)}"
        return name


def _check_tree(tree: BeamTree, shape: Eagle3Shape) -> None:
    """Raises ConfigError if a drafter of this shape cannot draft the tree."""
    if shape.mask_token_id is not None or any(shape.layer_windows):
        raise errors.ConfigError(
            "drafter.tree: P-EAGLE and layers with a window draft chains only; leave it out"
        )
    vocab_size = shape.draft_vocab_size
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
