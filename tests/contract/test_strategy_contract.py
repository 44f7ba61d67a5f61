"""The contract of drafting strategies, in a loop of two programs that needs no engine.

The loop is that of examples/speculative_decoding.py for ragged batches, trees and sampling. What a
strategy drafts may be good or bad; what comes out must be what plain decoding gives.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import expected, random_prompts
from support.forms import FORMS, Form, each_form
from support.models import ARCHITECTURE, make_cache, make_sampling, make_sharding, target, zeros

from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.wrappers.copies import WithCopies
from dflash.inference.cycle import tree as trees
from dflash.inference.cycle import verify
from dflash.inference.logits.sampling import SamplingParams, SequenceSampler
from dflash.layers.cache import PagedCache

PROMPTS = random_prompts([10, 16, 9, 20, 12])
LIMITS = [20, 1, 25, 7, 16]
ROWS, MAX_LENGTH = 48, 64


class Batch(NamedTuple):
    """Sequences whose last token, the anchor, is in neither cache nor state yet.

    Attributes:
      length: int32 [B]; tokens, anchor included.
      anchor: int32 [B].
      cache: The target's cache of all tokens before the anchors.
      state: The drafter's state of them.
    """

    length: jax.Array
    anchor: jax.Array
    cache: PagedCache
    state: Any


def prefill(target, model, sampler, cache, state, tokens, count) -> Batch:
    """Runs prompts, the first `count` of each row of `tokens`, and draws the first anchors."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    layers = {"feature_layers": model.feature_layers}
    output = target(tokens, positions, cache, **layers, count=count)
    drawn = sampler.sample(target.unembed(output.hidden), positions + 1)
    slots = jnp.arange(len(count))
    anchor = drawn[slots, count - 1]
    following = jnp.pad(tokens, ((0, 0), (0, 1))).at[slots, count].set(anchor)
    start = jnp.zeros_like(count)
    state = model.observe(state, start, following, count, output.features, target)
    return Batch(count + 1, anchor, output.cache, state)


def cycle(target, model, sampler, batch, limit) -> tuple[Batch, Proposal, jax.Array, jax.Array]:
    """Drafts, verifies, and shows the drafter what is committed: up to `limit` tokens of each."""
    start = batch.length - 1
    proposal, state = model.draft(batch.state, batch.anchor, start, sampler, target)
    tokens = jnp.concatenate([batch.anchor[:, None], proposal.tokens], axis=1)
    tree, depth, mask = None, jnp.arange(tokens.shape[1]), None
    if proposal.parents is not None:
        tree = trees.from_parents(proposal.parents, model.longest_path - 1)
        depth, mask = tree.depth, tree.ancestry
    positions = jnp.broadcast_to(start[:, None] + depth, tokens.shape)
    layers = {"feature_layers": model.feature_layers}
    output = target(tokens, positions, batch.cache, **layers, tree_mask=mask)
    sampled = sampler.sample(target.unembed(output.hidden), positions + 1)
    if tree is None:
        result, path = verify.coupled_chain(proposal.tokens, sampled), jnp.arange(tokens.shape[1])
    else:
        result = verify.coupled_tree(proposal.tokens, sampled, tree)
        path = result.path
    slots = jnp.arange(len(start))[:, None]
    committed, features = sampled[slots, path], output.features[slots, path]
    count = jnp.minimum(result.num_accepted + 1, limit - batch.length)
    following = jnp.concatenate([batch.anchor[:, None], committed], axis=1)
    state = model.review(state, proposal, sampled)
    state = model.observe(state, start, following, count, features, target)
    anchor = following[slots[:, 0], count]
    cache = output.cache.commit(start, count, result.path, target.sharding)
    return Batch(batch.length + count, anchor, cache, state), proposal, committed, count


class Loop:
    """Both programs of a form, and its weights."""

    def __init__(self, form: Form):
        self.drafter = form.build()
        self._graph, self._params = nnx.split((target(), self.drafter))
        self._run = jax.jit(self._merged, static_argnums=0)

    def _merged(self, function, params, sampling, *arguments, with_probs=False):
        sampler = SequenceSampler(sampling, with_probs)
        return function(*nnx.merge(self._graph, params), sampler, *arguments)

    def start(self, sequences, sampling: SamplingParams) -> Batch:
        cache = make_cache(target(), len(sequences), MAX_LENGTH, page_size=16)
        state = zeros(self.drafter.init_state(len(sequences), MAX_LENGTH))
        count = np.array([len(tokens) for tokens in sequences], np.int32)
        tokens = np.array([np.pad(tokens, (0, ROWS - len(tokens))) for tokens in sequences])
        tokens = tokens.astype(np.int32)
        return self._run(prefill, self._params, sampling, cache, state, tokens, count)

    def cycle(self, batch: Batch, sampling: SamplingParams, limit):
        return self._run(cycle, self._params, sampling, batch, np.array(limit, np.int32))


loop = functools.cache(Loop)


@dataclasses.dataclass(frozen=True)
class Copied(Form):
    """A form whose sequences may copy their context instead."""

    def __str__(self):
        return f"{super().__str__()}-copies"

    def build(self) -> Drafter:
        return WithCopies(super().build(), make_sharding())


@pytest.mark.parametrize("form", [*FORMS, Copied("dflash")], ids=str)
@pytest.mark.parametrize(("first", "seed"), [(0.0, 0), (0.8, 2**32 - 1)])
def test_output_is_that_of_plain_decoding(form, first, seed):
    """Greedy and sampled sequences alternate."""
    temperatures = [first, 0.8 - first] * 2 + [first]
    by_temperature = {
        temperature: expected(PROMPTS, LIMITS, temperature=temperature, seed=seed)
        for temperature in (0.0, 0.8)
    }
    sampling, run = make_sampling(temperatures, seed), loop(form)
    batch = run.start(PROMPTS, sampling)
    limit = [len(p) + n for p, n in zip(PROMPTS, LIMITS, strict=True)]
    outputs = [[int(anchor)] for anchor in batch.anchor]
    while (np.asarray(batch.length) < limit).any():
        batch, proposal, committed, count = run.cycle(batch, sampling, limit)
        check_proposal(run.drafter, proposal)
        extend(outputs, committed, count)
        assert count.min() >= 0
        assert count.max() <= run.drafter.longest_path
    for i, (output, temperature) in enumerate(zip(outputs, temperatures, strict=True)):
        assert tuple(output) == by_temperature[temperature][i][0]


def extend(texts: list[list[int]], committed: jax.Array, count: jax.Array) -> None:
    for text, tokens, number in zip(texts, committed.tolist(), count.tolist(), strict=True):
        text += tokens[:number]


def check_proposal(model: Drafter, proposal: Proposal) -> None:
    tokens = np.asarray(proposal.tokens)
    assert tokens.shape == (len(PROMPTS), model.num_draft_tokens)
    assert tokens.dtype == np.int32
    assert ((tokens >= 0) & (tokens < ARCHITECTURE.vocab_size)).all()
    assert (proposal.confidence is not None) == model.has_confidence
    assert proposal.probs is None
    if proposal.parents is not None:
        parents = np.asarray(proposal.parents)
        assert ((parents >= 0) & (parents <= np.arange(tokens.shape[1]))).all()
        siblings = {(b, parents[b, g], tokens[b, g]) for b, g in np.ndindex(tokens.shape)}
        assert len(siblings) == tokens.size, "siblings share a token"
        depth = np.zeros((len(tokens), tokens.shape[1] + 1), int)
        for g in range(tokens.shape[1]):
            depth[:, g + 1] = 1 + depth[np.arange(len(tokens)), parents[:, g]]
        assert depth.max() < model.longest_path


@each_form
def test_live_state_drafts_as_a_freshly_prefilled_one(form):
    """State commits in `observe` alone, and holds the committed tokens and nothing else.

    Unless a strategy reviews rejected rows too: its drafts then depend on earlier rejected ones.
    """
    run, greedy = loop(form), make_sampling([0.0] * len(PROMPTS))
    if type(run.drafter).review is not Drafter.review:
        pytest.skip("the state depends on rejected rows")
    limit = [MAX_LENGTH] * len(PROMPTS)
    live = run.start(PROMPTS, greedy)
    texts = [[*prompt, int(anchor)] for prompt, anchor in zip(PROMPTS, live.anchor, strict=True)]
    for _ in range(3):
        live, _, committed, count = run.cycle(live, greedy, limit)
        extend(texts, committed, count)
    fresh = run.start([text[:-1] for text in texts], greedy)
    np.testing.assert_array_equal(live.anchor, fresh.anchor)
    (_, mine, *_), (_, other, *_) = (run.cycle(each, greedy, limit) for each in (live, fresh))
    np.testing.assert_array_equal(mine.tokens, other.tokens)
    jax.tree.map(np.testing.assert_array_equal, mine.parents, other.parents)
    # Confidences are sums over rows that arrived in other groups.
    rounded = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(rounded, mine.confidence, other.confidence)


@each_form
def test_probabilities_are_those_that_drafts_were_drawn_from(form):
    """The drafts of rejection verification."""
    model = loop(form).drafter
    abstract = model.init_state(5, MAX_LENGTH)
    assert all(leaf.sharding is not None for leaf in jax.tree.leaves(abstract))
    sampling = make_sampling([0.8, 0.0, 0.8, 0.0, 0.8])
    anchor = jnp.arange(5, dtype=jnp.int32)

    @jax.jit
    def draft(state):
        sampler = SequenceSampler(sampling, with_probs=True)
        return model.draft(state, anchor, jnp.zeros(5, jnp.int32), sampler, target())

    proposal, after = draft(zeros(abstract))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )
    assert (proposal.probs is not None) == model.has_probs
    if proposal.probs is None:
        return
    probs, tokens = np.asarray(proposal.probs), np.asarray(proposal.tokens)
    np.testing.assert_allclose(probs.sum(axis=-1), 1.0, atol=1e-5)
    drawn_from = np.tile(np.arange(tokens.shape[1]), (5, 1))
    if proposal.drawn_from is not None:
        drawn_from = np.asarray(proposal.drawn_from)
    drawn = probs[np.arange(5)[:, None], drawn_from, tokens] > 0
    # A greedy sequence has one token to draw: further siblings are sure, not drawn.
    assert drawn[np.asarray(sampling.temperature) > 0].all()
    assert drawn[:, 0].all()
