"""Tests of acceptance: coupled against plain Python, rejection against exact distributions."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.inference import sampling, verify
from dflash.inference.engine import Slot
from dflash.inference.pages import PagePool
from dflash.inference.sampling import SamplingParams

few = settings(deadline=None, derandomize=True, database=None)
VOCAB = 6
rejection_chain = verify.rejection_chain
coupled_chain = jax.jit(verify.coupled_chain)


@few
@given(
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_the_longest_equal_prefix_is_accepted(draft, sampled):
    verdict = coupled_chain(np.array([draft], np.int32), np.array([sampled], np.int32))
    count = 0
    while count < 4 and draft[count] == sampled[count]:
        count += 1
    assert verdict.num_accepted.tolist() == [count]
    assert verdict.next_token.tolist() == [sampled[count]]
    assert verdict.path is None


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3\) does not fit sampled \(2, 3\)"):
        verify.coupled_chain(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"draft_probs \(2, 2, 6\), logits \(2, 4, 6\) differ"):
        verify.rejection_chain(
            jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 2, VOCAB)), jnp.zeros((2, 4, VOCAB)),
            jnp.zeros((2, 4), jnp.int32), make_params(2),
        )  # fmt: skip


# --- rejection: whatever was drafted, the output follows the target ------------------------------


def make_params(batch: int, temperature: float = 1.0, seed: int = 0) -> SamplingParams:
    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), batch)
    return SamplingParams(
        jax.random.key_data(keys),
        jnp.full(batch, temperature, jnp.float32),
        jnp.zeros(batch, jnp.int32),
        jnp.ones(batch, jnp.float32),
    )


def always_accept(draft, draft_probs, logits, positions, params):
    """Wrong: the drafts go through, whatever the target thinks of them."""
    sampled = sampling.sample(logits, positions, params, sampling.RESIDUAL)
    return verify.coupled_chain(draft, jnp.concatenate([draft, sampled[:, -1:]], axis=1))


def redraw_from_target(draft, draft_probs, logits, positions, params):
    """Wrong: a refused draft is replaced by a draw from p, not from what p has over q."""
    verdict = rejection_chain(draft, draft_probs, logits, positions, params)
    sampled = sampling.sample(logits, positions, params, sampling.RESIDUAL)
    at = verdict.num_accepted[:, None]
    return verdict._replace(next_token=jnp.take_along_axis(sampled, at, axis=1)[:, 0])


def too_lenient(draft, draft_probs, logits, positions, params):
    """Wrong by a fifth in the acceptance threshold."""
    return rejection_chain(draft, 0.8 * draft_probs, logits, positions, params)


def one_noise_for_all(draft, draft_probs, logits, positions, params):
    """Wrong: all positions accept and redraw with the noise of one."""
    return rejection_chain(draft, draft_probs, logits, positions * 0, params)


WRONG_RULES = [always_accept, redraw_from_target, too_lenient, one_noise_for_all]
SAMPLES = 40_000


@functools.partial(jax.jit, static_argnums=0)
def two_tokens(rule, target_logits, draft_logits, params):
    """The first two tokens of each sequence: of one cycle, or of two if the first ends early.

    Args:
      target_logits: [1 + V + V², V]; after no token, after one (by token), after two.
      draft_logits: [1 + V, V]; after no token, after one: the drafter knows no more.
    """
    batch = params.temperature.shape[0]
    start = jnp.zeros((batch,), jnp.int32)

    def cycle(position, so_far):
        """One cycle of two drafts after no token or one: `so_far` is the row of the logits."""
        positions = position[:, None] + jnp.arange(3)
        before = draft_logits[so_far][:, None]
        first = sampling.sample(before, positions[:, :1], params, sampling.DRAFT)
        after = draft_logits[1 + first]
        second = sampling.sample(after, positions[:, 1:2], params, sampling.DRAFT)
        draft = jnp.concatenate([first, second], axis=1)
        probs = sampling.probabilities(jnp.concatenate([before, after], axis=1), params)
        one = so_far * VOCAB + 1 + first[:, 0]
        two = one * VOCAB + 1 + second[:, 0]
        rows = jnp.stack([so_far, one, two], axis=1)
        # The second cycle looks past two tokens, at what does not count.
        logits = target_logits[jnp.minimum(rows, target_logits.shape[0] - 1)]
        verdict = rule(draft, probs, logits, positions, params)
        is_next = jnp.arange(2) == verdict.num_accepted[:, None]
        tokens = jnp.where(is_next, verdict.next_token[:, None], draft)
        return tokens, verdict.num_accepted + 1

    tokens, count = cycle(start, start)
    first = tokens[:, 0]
    again, _ = cycle(start + 1, 1 + first)
    return first, jnp.where(count >= 2, tokens[:, 1], again[:, 0])


def joint_pvalue(rule) -> float:
    """How well the joint distribution of two tokens fits the target's, by chi-square."""
    rng = np.random.default_rng(0)
    target_logits = rng.normal(size=(1 + VOCAB + VOCAB**2, VOCAB)).astype(np.float32)
    draft_logits = rng.normal(size=(1 + VOCAB, VOCAB)).astype(np.float32)
    first, second = two_tokens(rule, target_logits, draft_logits, make_params(SAMPLES))
    p_first = scipy.special.softmax(target_logits[0].astype(np.float64))
    p_second = scipy.special.softmax(target_logits[1 : 1 + VOCAB].astype(np.float64), axis=-1)
    return chi_square(np.asarray(first), np.asarray(second), p_first[:, None] * p_second)


def chi_square(first: np.ndarray, second: np.ndarray, joint: np.ndarray) -> float:
    vocab = len(joint)
    counts = np.bincount(first * vocab + second, minlength=vocab**2)
    wanted = joint.ravel() * len(first)
    return scipy.stats.chisquare(counts, wanted * len(first) / wanted.sum()).pvalue


def test_rejection_follows_the_target():
    assert joint_pvalue(rejection_chain) > 1e-3


@pytest.mark.parametrize("rule", WRONG_RULES, ids=lambda rule: rule.__name__)
def test_wrong_rules_are_found(rule):
    assert joint_pvalue(rule) < 1e-6


def test_greedy_rejection_is_greedy_decoding():
    rng = np.random.default_rng(1)
    batch, drafts = 64, 3
    logits = jnp.array(rng.normal(size=(batch, drafts + 1, VOCAB)), jnp.float32)
    best = jnp.argmax(logits, axis=-1)
    draft = jnp.where(rng.random((batch, drafts)) < 0.7, best[:, :-1], (best[:, :-1] + 1) % VOCAB)
    verdict = jax.jit(rejection_chain)(
        draft,
        jax.nn.one_hot(draft, VOCAB),
        logits,
        jnp.tile(jnp.arange(drafts + 1), (batch, 1)),
        make_params(batch, temperature=0.0),
    )
    coupled = verify.coupled_chain(draft, best)
    np.testing.assert_array_equal(verdict.num_accepted, coupled.num_accepted)
    np.testing.assert_array_equal(verdict.next_token, coupled.next_token)
    assert set(np.asarray(verdict.num_accepted)) == set(range(drafts + 1))


# --- the same through the engine -----------------------------------------------------------------

SLOTS, ROUNDS, PROMPT, TEMPERATURE = 512, 48, (3, 1, 4, 1, 5), 2.5


@functools.cache
def full_engine():
    """An engine, its slots all holding one prompt, and that prompt's prefix."""
    small = tiny_models.target(vocab_size=VOCAB)
    model = tiny_models.drafter("dflash", block_size=3, arch=small.arch)
    run = tiny_models.engine(
        model, on=small, batch_size=SLOTS, sync_every=2, max_length=16,
        temperature=TEMPERATURE, verify="rejection",
    )  # fmt: skip
    pool = PagePool(1, run.layout.pages_per_share)
    prefix, state = run.prefill(PROMPT), run.new_state()
    for i in range(SLOTS):
        slot = Slot(i, pool.take(0, run.layout.pages_per_sequence))
        state = run.insert(state, prefix, slot, 16)
    return run, state, prefix


def engine_pvalue(run) -> float:
    """As `joint_pvalue`, for the two tokens after a prompt and its first token."""
    _, start, prefix = full_engine()
    firsts, seconds, accepted = [], [], 0
    for i in range(ROUNDS):
        noise = dataclasses.replace(start.sampling, seed=make_params(SLOTS, seed=i).seed)
        state = dataclasses.replace(start, sampling=noise)
        _, report = run.generate(jax.tree.map(jnp.copy, state))
        tokens, counts = np.asarray(report.tokens), np.asarray(report.num_committed)
        firsts.append(tokens[0, :, 0])
        seconds.append(np.where(counts[0] > 1, tokens[0, :, 1], tokens[1, :, 0]))
        accepted += np.count_nonzero(counts[0] > 1)
    first, second = np.concatenate(firsts), np.concatenate(seconds)
    assert len(first) >= 20_000
    assert 0.1 < accepted / len(first) < 0.9, "both accepting and refusing must happen"
    small = tiny_models.target(vocab_size=VOCAB)
    return chi_square(first, second, exact_joint(small, int(prefix.anchor[0])))


def exact_joint(small, anchor: int) -> np.ndarray:
    """p(t1, t2 | prompt, anchor), [V, V], from the target's logits."""
    texts = np.array([(*PROMPT, anchor, token) for token in range(VOCAB)], np.int32)
    cache = small.new_cache(batch=VOCAB, pages_per_sequence=1, num_pages=VOCAB + 1, page_size=16)
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)
    cache = dataclasses.replace(cache, page_table=1 + jnp.arange(VOCAB, dtype=jnp.int32)[:, None])
    positions = np.tile(np.arange(texts.shape[1], dtype=np.int32), (VOCAB, 1))
    logits = small.unembed(small(texts, positions, cache).hidden)
    probs = scipy.special.softmax(np.asarray(logits, np.float64) / TEMPERATURE, axis=-1)
    return probs[0, -2][:, None] * probs[:, -1]


def test_rejection_through_the_engine_follows_the_target():
    run, _, _ = full_engine()
    assert engine_pvalue(run) > 1e-3


def test_a_wrong_rule_in_the_engine_is_found(monkeypatch):
    monkeypatch.setattr(verify, "rejection_chain", too_lenient)
    run = copy.copy(full_engine()[0])
    run._programs = {}  # compile them with the wrong rule
    assert engine_pvalue(run) < 1e-6
