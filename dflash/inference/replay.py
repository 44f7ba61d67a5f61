"""Replays the cycles of a drafter on texts that the target has decoded.

Decoding gives the same text whatever the drafter. So one decoding serves every drafter: the target
computes the features of the texts once, and then only the drafter runs, cycle by cycle.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.drafters.base import Drafter, Heads, Proposal
from dflash.inference.cycle import tree as trees
from dflash.inference.logits.sampling import SamplingParams, SequenceSampler
from dflash.layers import cache as kv
from dflash.layers.products import matmul_precision
from dflash.models.decoder import Decoder

_MAX_CHUNK = 256  # Prompt rows that a drafter observes at once.
_MIN_CHUNK = 32
_MULTIPLE = 64  # Lengths of texts are padded, so that other texts share compiled programs.


class Text(NamedTuple):
    """Token ids of a prompt, and of the answer that decoding gives."""

    prompt: Sequence[int]
    answer: Sequence[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """B texts on device, padded to L tokens.

    Attributes:
      tokens: int32 [B, L].
      prompt: Length of each prompt, int32 [B].
      total: Length of each text, int32 [B].
      features: Features of each row after the layers of `layers`, [B, L, C·D].
      hidden: Hidden states of each row after the target's final norm, [B, L, D].
    """

    tokens: jax.Array
    prompt: jax.Array
    total: jax.Array
    features: jax.Array
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    hidden: jax.Array | None = None


class Drafts(NamedTuple):
    """Drafts of each cycle, as arrays [B, C, G], or [B, G] for a single cycle.

    Attributes:
      chance: Confidence that the draft is accepted if the one before it is, float32.
      depth: Number of tokens from the anchor, int32.
      counted: Whether the drafts before it were accepted, and the text has a token there, bool.
      accepted: Whether it was accepted, too, bool.
    """

    chance: Any
    depth: Any
    counted: Any
    accepted: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cycles:
    """At most C cycles of each of B texts, in order.

    Attributes:
      committed: Tokens committed, the bonus token included, int32 [B, C]; 0 once the text is over.
      remaining: Tokens of the text after the anchor, int32 [B, C].
      drafts: The drafts; None if the drafter states no confidence.
      probs: Probabilities that the sampler returned with the drafts, [B, C, G, …]; None if none.
    """

    committed: Any
    remaining: Any
    drafts: Drafts | None
    probs: Any = None

    @property
    def counts(self) -> Counter[int]:
        """Number of cycles by tokens committed."""
        lengths, counts = np.unique(self.committed[self.committed > 0], return_counts=True)
        return Counter(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))

    @property
    def anchors(self) -> np.ndarray:
        """Tokens of the answer before each cycle's anchor, int [B, C]."""
        return np.cumsum(self.committed, axis=1) - self.committed


class _Step(NamedTuple):
    state: Any
    anchor: jax.Array  # Position of the last committed token, int32 [B].
    number: jax.Array  # Cycles done, int32 [].
    cycles: Cycles  # The cycles done; zeros after them.


def compute(target: Decoder, texts: Sequence[Text], layers: Sequence[int]) -> Texts:
    """Returns the texts with the target's features."""
    tokens = np.zeros((len(texts), max(map(padded_length, texts))), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text.prompt) + len(text.answer)] = [*text.prompt, *text.answer]
    prompt = np.array([len(text.prompt) for text in texts], np.int32)
    total = prompt + np.array([len(text.answer) for text in texts], np.int32)
    tapped = tuple(sorted(set(layers)))
    graph, weights = nnx.split(target)
    batch, _ = kv.batch_axes(len(texts), target.sharding)
    layout = target.sharding.named(tokens.shape, (batch, None))
    placed = jax.make_array_from_callback(tokens.shape, layout, lambda index: tokens[index])
    with jax.default_matmul_precision(matmul_precision(target.dtype)):
        hidden, features = _forward(graph, tapped, weights, placed, total)
    return Texts(placed, prompt, total, features, tapped, hidden)


def padded_length(text: Text) -> int:
    """Returns the number of tokens that a text is padded to alone."""
    return -(-(len(text.prompt) + len(text.answer)) // _MULTIPLE) * _MULTIPLE


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(graph, layers, weights, tokens, total) -> tuple[jax.Array, jax.Array]:
    rows = jnp.arange(tokens.shape[1])
    segments = (rows < total[:, None]).astype(jnp.int32)
    positions = jnp.broadcast_to(rows, tokens.shape)
    target = nnx.merge(graph, weights)
    return target.forward(tokens, positions, segments, feature_layers=layers)


def cycles(
    drafter: Drafter,
    target: Decoder,
    texts: Texts,
    *,
    everywhere: bool = False,
    make_sampler: Callable[[Texts, Heads], Any] | None = None,
) -> Cycles:
    """Returns the cycles that decode the texts, as NumPy arrays.

    Args:
      target: Target, whose embedding and output head the drafter may use.
      everywhere: Begin a cycle at every token of the answers, as if each committed only one.
      make_sampler: Hashable function that returns a sampler for the texts, given `target` too; None
        to draft greedily.
    """
    (graph, weights), (heads_graph, heads) = nnx.split(drafter), nnx.split(target)
    longest = int((texts.total - texts.prompt).max())
    most = 1 << (longest - 1).bit_length()  # Few programs compile for texts of many lengths.
    texts = _of_layers(texts, drafter.feature_layers, target)
    run = functools.partial(_compiled, graph, heads_graph, most, everywhere, make_sampler)
    with jax.default_matmul_precision(matmul_precision(target.dtype)):
        results = run(weights, heads, texts)
    return jax.tree.map(np.asarray, results)


@functools.partial(jax.jit, static_argnums=range(5))
def _compiled(graph, heads_graph, most, everywhere, make_sampler, weights, heads, texts) -> Cycles:
    drafter, target = nnx.merge(graph, weights), nnx.merge(heads_graph, heads)
    found = _run(drafter, target, texts, most, everywhere, make_sampler or greedy)
    # Every process reads all results.
    return jax.lax.with_sharding_constraint(found, target.sharding.replicated())


def _of_layers(texts: Texts, layers: Sequence[int], target: Decoder) -> Texts:
    if layers == texts.layers:
        return dataclasses.replace(texts, layers=())
    width = target.arch.hidden_size
    parts = [
        texts.features[..., texts.layers.index(layer) * width :][..., :width] for layer in layers
    ]
    features = jnp.concatenate(parts, axis=-1) if parts else texts.features[..., :0]
    return dataclasses.replace(texts, features=features, layers=())


def _run(
    drafter: Drafter,
    heads: Heads,
    texts: Texts,
    most: int,
    everywhere: bool,
    make_sampler: Callable[[Texts, Heads], Any],
) -> Cycles:
    batch, length = texts.tokens.shape
    rows = drafter.longest_path
    sampler = make_sampler(texts, heads)

    def cycle(state: Any, anchor: jax.Array) -> tuple[Any, jax.Array, Cycles]:
        remaining = jnp.maximum(texts.total - 1 - anchor, 0)
        tokens = _slice(texts.tokens, anchor, rows + 1)
        proposal, state = drafter.draft(state, tokens[:, 0], anchor, sampler, heads)
        committed = jnp.minimum(num_accepted(proposal, tokens) + 1, remaining)
        features = _slice(texts.features, anchor, rows)
        steps = jnp.minimum(committed, 1) if everywhere else committed
        state = drafter.observe(state, anchor, tokens, steps, features, heads)
        found = drafts(proposal, tokens, remaining)
        return state, steps, Cycles(committed, remaining, found, proposal.probs)

    def advance(step: _Step) -> _Step:
        state, steps, result = cycle(step.state, step.anchor)
        recorded = jax.tree.map(
            lambda rows, row: rows.at[:, step.number].set(row), step.cycles, result
        )
        return _Step(state, step.anchor + steps, step.number + 1, recorded)

    state = observe_prompts(drafter, heads, texts, length + drafter.block_size)
    *_, form = jax.eval_shape(cycle, state, texts.prompt)
    empty = jax.tree.map(lambda x: jnp.zeros((batch, most, *x.shape[1:]), x.dtype), form)
    first = _Step(state, texts.prompt, jnp.int32(0), empty)
    last = jax.lax.while_loop(lambda step: (step.anchor < texts.total - 1).any(), advance, first)
    return last.cycles


def num_accepted(proposal: Proposal, tokens: jax.Array) -> jax.Array:
    """Returns how many drafts are tokens of the text, int32 [B].

    Args:
      tokens: The anchor and the text after it, int32 [B, longest path + 1].
    """
    tree, accepted = _accepted(proposal, tokens)
    return jnp.where(accepted, tree.depth, 0).max(axis=1)


def drafts(proposal: Proposal, tokens: jax.Array, remaining: jax.Array) -> Drafts | None:
    """Returns the drafts of a cycle; None without confidence.

    Args:
      tokens: The anchor and the text after it, int32 [B, longest path + 1].
      remaining: Number of tokens of the text after the anchor, int32 [B].
    """
    chance = proposal.confidence
    if chance is None:
        return None
    tree, accepted = _accepted(proposal, tokens)
    if proposal.parents is not None:  # The confidence is that in all drafts of the path.
        along = jnp.pad(chance, ((0, 0), (1, 0)), constant_values=1.0)
        chance = chance / jnp.take_along_axis(along, tree.parents, axis=1)
    depth = tree.depth[:, 1:]
    counted = jnp.take_along_axis(accepted, tree.parents, axis=1) & (depth <= remaining[:, None])
    return Drafts(chance, depth, counted, counted & accepted[:, 1:])


def _accepted(proposal: Proposal, tokens: jax.Array) -> tuple[trees.Tree, jax.Array]:
    """Returns the tree of a proposal, and which rows and all before them are right, bool [B, R]."""
    parents = proposal.parents
    if parents is None:
        parents = jnp.broadcast_to(jnp.arange(proposal.tokens.shape[1]), proposal.tokens.shape)
    tree = trees.from_parents(parents, tokens.shape[1] - 2)
    expected = jnp.take_along_axis(tokens, tree.depth[:, 1:], axis=1)
    right = jnp.pad(proposal.tokens == expected, ((0, 0), (1, 0)), constant_values=True)
    return tree, jnp.all(right[:, None, :] | ~tree.ancestry, axis=-1)


def observe_prompts(drafter: Drafter, heads: Heads, texts: Texts, room: int) -> Any:
    """Returns the drafter's state after the prompts, which cover the positions before anchors."""
    batch, length = texts.tokens.shape
    size = max(_MIN_CHUNK, min(_MAX_CHUNK, 1 << (length - 1).bit_length()))

    def zeros(leaf):
        return jax.lax.with_sharding_constraint(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    def observe(chunk, state):
        start = jnp.full(batch, chunk * size, jnp.int32)
        tokens = _slice(texts.tokens, start, size + 1)
        count = jnp.clip(texts.prompt - start, 0, size)
        features = _slice(texts.features, start, size)
        return drafter.observe(state, start, tokens, count, features, heads)

    # Padded chunks must not exceed the state: a write past its end would land on earlier rows.
    room = max(room, -(-length // size) * size)
    state = jax.tree.map(zeros, drafter.init_state(batch, room))
    return jax.lax.fori_loop(0, -(-texts.prompt.max() // size), observe, state)


def _slice(array: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Returns `count` rows of each sequence from its start on; rows past the end are arbitrary."""
    rows = jnp.minimum(start[:, None] + jnp.arange(count), array.shape[1] - 1)
    return jnp.take_along_axis(array, rows.reshape(*rows.shape, *[1] * (array.ndim - 2)), axis=1)


def greedy(texts: Texts, heads: Heads) -> SequenceSampler:
    """Returns a sampler that drafts the likeliest tokens."""
    del heads
    batch = len(texts.tokens)
    zeros = jnp.zeros(batch, jnp.float32)
    none = jnp.zeros(batch, jnp.int32)
    keys = jnp.zeros((batch, 2), jnp.uint32)
    return SequenceSampler(SamplingParams(keys, zeros, none, zeros + 1, zeros))
