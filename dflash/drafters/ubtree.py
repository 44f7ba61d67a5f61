"""UBTree: DFlash with a selector whose codes are functions of the target's embeddings.

Source: arXiv 2609.39972, by its equations. As in DFlash2, a bilinear score of previous token,
hidden state and candidate reranks the most likely tokens of each draft position. The codes of
tokens are not learned one by one: two networks compute them from the target's frozen embeddings,
and decoding looks them up in tables of the networks' outputs. Each draft position has a factor on
the base logits and one on the scores.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.drafters.dflash2 import CandidateSelector, DFlash2
from dflash.drafters.ubtree_config import UBTreeConfig, UBTreeShape
from dflash.layers import losses
from dflash.layers.linear import Linear
from dflash.parallel import parameters

_SCALES = ("log_base_scale", "log_score_scale")
_CHUNK_TOKENS = 4096  # Tokens per device whose codes are computed at once.


class CodeNetwork(nnx.Module):
    """Network from rows of the target's embedding table to codes: an MLP without biases."""

    def __init__(self, inputs: int, width: int, rank: int, **build):
        self.up = Linear(inputs, width, ("embed", "mlp"), **build)
        self.down = Linear(width, rank, ("mlp", None), **build)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Maps rows [..., D] to codes [..., r]."""
        return self.down(jax.nn.silu(self.up(rows)))


class CodeSelector(CandidateSelector):
    """DFlash2's selector with factors per draft position, and networks in place of codebooks.

    Attributes:
      log_base_scale: Logarithms of the factors on base logits, [G].
      log_score_scale: Logarithms of the factors on scores, [G].
      predecessor_network: Network of the codes of previous tokens; None if there are codebooks.
      successor_network: Network of the codes of candidates; None if there are codebooks.
    """

    def __init__(self, shape: UBTreeShape, **build):
        super().__init__(shape, **build)
        for name in _SCALES:
            size = (shape.block_size - 1,)
            setattr(self, name, parameters.declare(size, (None,), stddev=0.0, **build))
        self.predecessor_network = self.successor_network = nnx.data(None)
        if shape.selector_hidden_size:
            inputs = shape.target_hidden_size or shape.decoder.hidden_size
            sizes = inputs, shape.selector_hidden_size, shape.selector_rank
            self.predecessor_network = CodeNetwork(*sizes, **build)
            self.successor_network = CodeNetwork(*sizes, **build)
            self.predecessor_codebook = self.successor_codebook = nnx.data(None)

    def scales(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Returns the factors of the first draft positions, each float32 [count, 1]."""
        logs = (getattr(self, name)[:count, None] for name in _SCALES)
        base, score = (jnp.exp(log.astype(jnp.float32)) for log in logs)
        return base, score


class UBTree(DFlash2):
    """UBTree drafter, whose state is the same as DFlash's.

    It drafts with codebooks. If it has networks, `tabulate` replaces them.
    """

    hf_architectures = ("UBTreeDraftModel",)
    shape_class = UBTreeShape

    @classmethod
    def create(cls, config: UBTreeConfig, hf, target, *, dtype, sharding):
        drafter = super().create(config, hf, target, dtype=dtype, sharding=sharding)
        drafter.exports_tables = config.codes == "tables"
        return drafter

    @staticmethod
    def make_selector(shape, **build):
        return CodeSelector(shape, **build)

    def tabulate(self, heads):
        selector, shape = self.candidate_selector, self.shape
        if not shape.selector_hidden_size:
            return
        selector.declare_codebooks(shape, dtype=self.dtype, sharding=self.sharding)
        tables = selector.predecessor_codebook, selector.successor_codebook
        networks = selector.predecessor_network, selector.successor_network
        if not isinstance(networks[0].up.kernel.get_value(), jax.ShapeDtypeStruct):
            everything = jnp.arange(shape.decoder.vocab_size)
            drafted = everything if self.d2t is None else self.vocabulary().target_ids
            for table, network, tokens in zip(tables, networks, (everything, drafted), strict=True):
                graph, state = nnx.split((network, heads))
                codes = _encode(graph, table.embedding.get_value(), state, tokens)
                table.embedding.set_value(codes)
        selector.predecessor_network = selector.successor_network = nnx.data(None)
        self.shape = dataclasses.replace(shape, selector_hidden_size=0)

    def prepare(self, hidden):
        """Projects hidden states [..., G, D], and appends the factor on base logits."""
        base, score = self.candidate_selector.scales(hidden.shape[-2])
        projected = super().prepare(hidden) * score
        return jnp.concatenate([projected, jnp.broadcast_to(base, (*hidden.shape[:-1], 1))], -1)

    def condition(self, previous, prepared, memory):
        """Returns DFlash2's vectors, and the factor on base logits as their last element."""
        vectors, memory = super().condition(previous, prepared[..., :-1], memory)
        base = jnp.broadcast_to(prepared[..., -1:], (*vectors.shape[:-1], 1))
        return jnp.concatenate([vectors, base.astype(vectors.dtype)], -1), memory

    def corrected(self, base, vectors):
        return base * vectors[..., -1:].astype(base.dtype) + self.bias(vectors[..., :-1])

    def correct(self, choices, vectors, sampler):
        scaled = choices._replace(logits=choices.logits * vectors[..., -1:])
        return super().correct(scaled, vectors[..., :-1], sampler)

    def loss(self, batch, heads, key, options, *, anchors=None, remat=False):
        """Computes DFlash2's loss, whose gradients reach the networks through their tables."""
        tabulated = nnx.clone(self)
        tabulated.tabulate(heads)
        return super(UBTree, tabulated).loss(
            batch, heads, key, options, anchors=anchors, remat=remat
        )

    @staticmethod
    def checkpoint_name(path: str) -> str:
        is_scale = path.rpartition(".")[2] in _SCALES
        return path if is_scale else DFlash2.checkpoint_name(path)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(graph: nnx.GraphDef, like: jax.ShapeDtypeStruct, state: nnx.State, tokens: jax.Array):
    """Returns the codes [N, r] of tokens int32 [N], in the dtype and sharding of `like`.

    `graph` and `state` are those of a code network and the target's heads. Each replica of the
    batch encodes a part of the tokens.
    """
    network, heads = nnx.merge(graph, state)
    size, replicas = tokens.shape[0], network.up.sharding.size("batch")
    padded = jnp.pad(tokens, (0, -size % replicas)).reshape(replicas, -1)
    codes = losses.in_chunks(
        lambda tokens: network(heads.table_rows(tokens)), (padded,), _CHUNK_TOKENS
    )
    codes = codes.reshape(-1, codes.shape[-1])[:size].astype(like.dtype)
    return jax.lax.with_sharding_constraint(codes, like.sharding)
