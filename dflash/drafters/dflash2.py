"""DFlash2: DFlash with short convolutions along the block and a selector among likely tokens.

Source: z-lab/dflash and speculators 0.9 (`models/dflash2`), by their golden vectors. The attention
and the MLP of each layer have causal convolutions over the rows of a block before and after them.
Each row computes its own taps, one set per group of channels. A selector reranks the most likely
tokens of each draft position by a bilinear score of previous token, hidden state and candidate.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config.train_schema import CANDIDATE_KL
from dflash.drafters.dflash2_config import DFlash2Shape
from dflash.drafters.parts.blocks import block_loss, target_rows
from dflash.drafters.parts.conditioned import ConditionedDFlash, ConditionedRows
from dflash.layers import losses
from dflash.layers.linear import Embedding, Linear
from dflash.layers.losses import TokenScores
from dflash.layers.products import finish
from dflash.layers.transformer import TransformerLayer, grouped_attention
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

# Tables whose names in checkpoints do not end in ".weight".
_CODEBOOKS = ("predecessor_codebook", "successor_codebook")


class DynamicConvolution(nnx.Module):
    """Causal convolutions over the rows of a block, one before a sublayer and one after it.

    Both are initialized to the identity. The taps are the sum of a kernel per channel and a
    correction per group of channels, which is a projection of the row's normalized input.
    """

    def __init__(self, width: int, *, taps: int, group_size: int, dtype, sharding: Sharding):
        self.base_kernel = parameters.declare(
            (2, taps, width),
            (None, None, None),
            dtype=dtype,
            sharding=sharding,
            stddev=0.0,
            offset=((1.0,), *((0.0,) for _ in range(taps - 1))),
        )
        groups = width // group_size
        self.kernel_projection = Linear(
            width, 2 * taps * groups, ("embed", None), stddev=0.0, dtype=dtype, sharding=sharding
        )
        self.taps, self.groups = taps, groups
        self.sharding = sharding

    def kernels(self, normed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the taps of both convolutions, each [B, T, taps, groups, D / groups]."""
        added = finish(self.kernel_projection(normed), self.sharding)
        added = added.reshape(*normed.shape[:2], 2, self.taps, self.groups, 1)
        base = self.base_kernel[...].reshape(2, self.taps, self.groups, -1)
        return base[0] + added[:, :, 0], base[1] + added[:, :, 1]


def convolve(x: jax.Array, kernels: jax.Array, rows: int) -> jax.Array:
    """Convolves the rows of each block: out[r] = sum over t of kernels[r, t] · x[r - t].

    Rows before the first row of a block count as zeros.

    Args:
      x: Rows of consecutive blocks, [B, T, D].
      kernels: Taps of each row, [B, T, taps, groups, D / groups].
      rows: Number of rows per block, a divisor of T.
    """
    batch, _, taps, groups, width = kernels.shape
    blocks = x.reshape(batch, -1, rows, groups, width)
    kernels = kernels.reshape(batch, -1, rows, taps, groups, width)
    total = jnp.zeros_like(blocks)
    for tap in range(min(taps, rows)):
        padding = [(0, 0), (0, 0), (tap, 0), (0, 0), (0, 0)]
        total += jnp.pad(blocks, padding)[:, :, :rows] * kernels[:, :, :, tap]
    return total.reshape(x.shape)


class ConvolvedLayer(TransformerLayer):
    """Transformer layer with convolutions around attention and MLP.

    Attributes:
      rows: Number of rows per block.
    """

    rows: int

    def __init__(self, shape: DFlash2Shape, *, dtype, sharding: Sharding):
        build = {"dtype": dtype, "sharding": sharding}
        attention = grouped_attention(shape.decoder, **shape.attention_form, **build)
        super().__init__(shape.decoder, attention=attention, **build)
        options = {"taps": shape.conv_kernel_size, "group_size": shape.conv_group_size} | build
        self.attention_conv = DynamicConvolution(shape.decoder.hidden_size, **options)
        self.mlp_conv = DynamicConvolution(shape.decoder.hidden_size, **options)

    def attention_branch(self, normed, cos_sin, attend):
        before, after = self.attention_conv.kernels(normed)
        normed = convolve(normed, before, self.rows)
        branch, auxiliary = super().attention_branch(normed, cos_sin, attend)
        return convolve(finish(branch, self.sharding), after, self.rows), auxiliary

    def mlp_branch(self, normed):
        before, after = self.mlp_conv.kernels(normed)
        branch = super().mlp_branch(convolve(normed, before, self.rows))
        return convolve(finish(branch, self.sharding), after, self.rows)


def set_rows(layers: Iterable[TransformerLayer], rows: int) -> None:
    """Sets the number of rows per block in those layers that have convolutions."""
    for layer in layers:
        if isinstance(layer, ConvolvedLayer):
            layer.rows = rows


class CandidateSelector(nnx.Module):
    """Bilinear score of a candidate: predecessor code · projected hidden state · its own code."""

    def __init__(self, shape: DFlash2Shape, **build):
        sizes = shape.decoder.hidden_size, shape.selector_rank
        self.declare_codebooks(shape, **build)
        self.hidden_projection = Linear(*sizes, ("embed", None), **build)

    def declare_codebooks(self, shape: DFlash2Shape, **build) -> None:
        """Declares the codes of all tokens: of the previous one, and of candidates."""
        rank = shape.selector_rank
        self.predecessor_codebook = Embedding(shape.decoder.vocab_size, rank, **build)
        self.successor_codebook = Embedding(shape.num_draft_tokens, rank, **build)


class DFlash2(ConditionedDFlash):
    """DFlash2 drafter, whose state is the same as DFlash's."""

    hf_architectures = ("DFlash2DraftModel", "DFlash2Speculator")
    shape_class = DFlash2Shape

    @property
    def num_candidates(self):
        return super().num_candidates or self.shape.selector_top_k

    @property
    def successors(self):
        return self.candidate_selector.successor_codebook

    def declare_head(self, **build):
        self.candidate_selector = self.make_selector(self.shape, **build)
        set_rows(self.layers, self.pass_positions + 1)

    @staticmethod
    def make_layer(shape, **build):
        make = ConvolvedLayer if shape.conv_kernel_size else ConditionedDFlash.make_layer
        return make(shape, **build)

    @staticmethod
    def make_selector(shape: DFlash2Shape, **build) -> CandidateSelector:
        """Returns the abstract selector."""
        return CandidateSelector(shape, **build)

    def prepare(self, hidden):
        return self.candidate_selector.hidden_projection(hidden)

    def condition(self, previous, prepared, memory):
        """Multiplies the previous token's code by the projected hidden state; has no memory."""
        code = self.candidate_selector.predecessor_codebook(previous)
        return code * prepared.astype(code.dtype), memory

    def loss(self, batch, heads, key, options, *, anchors=None, remat=False):
        """Computes the sum of the losses of base and corrected logits; see `DFlash.loss`.

        Both losses are over the whole vocabulary, since the label may not be among the candidates.
        The loss `candidate_kl` compares the candidates with the target; see `losses.score_likely`.
        """
        rows = self.run_conditioned(batch, heads, key, options, anchors=anchors, remat=remat)
        if options.name == CANDIDATE_KL:
            scores = self._score_candidates(rows, batch, heads, options)
            return block_loss(scores, rows.blocks, options)
        scores = self.score_conditioned(rows, batch, heads, options)
        corrected, metrics = block_loss(scores, rows.blocks, options)
        base_scores = self.score_base(rows, batch, heads, options)
        base, _ = block_loss(base_scores, rows.blocks, options)
        return corrected + base, metrics | {"loss": corrected + base, "base_loss": base}

    def _score_candidates(self, rows: ConditionedRows, batch, heads, options) -> TokenScores:
        labels = rows.blocks.labels
        if self.d2t is not None:
            labels = self.vocabulary().draft_ids[labels]

        def score(hidden, vectors, labels, target_hidden):
            base = self._unembed(hidden, heads)
            logits = base, self.corrected(base, vectors), self._unembed(target_hidden, heads)
            return losses.score_likely(*logits, labels, options)

        flat = (x.reshape(len(x), -1, *x.shape[3:]) for x in (rows.hidden, rows.vectors, labels))
        inputs = *flat, target_rows(batch, rows.blocks, options)
        scores = losses.in_chunks(score, inputs, options.chunk_tokens)
        return jax.tree.map(lambda x: x.reshape(labels.shape), scores)

    @staticmethod
    def checkpoint_name(path: str) -> str:
        stem, _, leaf = path.rpartition(".")
        if leaf == "base_kernel":
            return path
        is_codebook = stem.rpartition(".")[2] in _CODEBOOKS
        return stem if is_codebook else ConditionedDFlash.checkpoint_name(path)
