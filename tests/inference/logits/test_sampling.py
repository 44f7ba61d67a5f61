"""Tests of sampling: filters against numpy, noise that belongs to positions, distributions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st

from dflash.drafters.parts.draft_vocabulary import DraftVocabulary, Shortlist
from dflash.inference.logits import sampling
from dflash.inference.logits.sampling import SamplingParams, SequenceSampler
from dflash.inference.request import RequestSampling

VOCAB = 11
logit_rows = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB, unique=True)
options = st.tuples(
    st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
    st.integers(0, VOCAB + 2),
    st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.0, 0.03, 0.3, 1.0]),
)
sample = jax.jit(sampling.sample, static_argnums=3)
probabilities = jax.jit(sampling.probabilities)
filter_logits = jax.jit(sampling.filter_logits)


def p_value(counts, expected) -> float:
    from scipy import stats  # Takes a second.

    return stats.chisquare(counts, expected).pvalue


def make_params(*rows: tuple[float, ...], seed: int = 0) -> SamplingParams:
    """One sequence per (temperature, top_k, top_p), or (temperature, top_k, top_p, min_p)."""
    temperature, top_k, top_p, min_p = zip(*((*row, 0.0)[:4] for row in rows), strict=True)
    keys = np.random.default_rng(seed).integers(0, 2**32, (len(rows), 2), np.uint32)
    numbers = (np.array(each, np.float32) for each in (temperature, top_p, min_p))
    temperature, top_p, min_p = numbers
    return SamplingParams(keys, temperature, np.array(top_k, np.int32), top_p, min_p)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def reference_probabilities(
    logits, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> np.ndarray:
    """Temperature, then top-k, then top-p, then min-p, a token at a time."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / np.float64(temperature))
    order = np.argsort(-logits)[: top_k or len(logits)]
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / weights[order].sum()
    kept = [token for token in kept if weights[token] >= min_p * weights[kept].max()]
    probs = np.zeros(len(logits))
    probs[kept] = weights[kept] / weights[kept].sum()
    return probs


@given(st.lists(logit_rows, min_size=4, max_size=4), st.tuples(options, options))
def test_filters_against_numpy(rows, chosen):
    logits = np.array(rows, np.float32).reshape(2, 2, VOCAB) / 20
    probs = probabilities(logits, make_params(*chosen))
    for b in range(2):
        for t in range(2):
            wanted = reference_probabilities(logits[b, t].astype(np.float64), *chosen[b])
            np.testing.assert_allclose(probs[b, t], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "kept"), [((1.0, 3, 1.0), [1, 2, 4]), ((1.0, 0, 0.6), [1, 2, 4])]
)
def test_of_equals_the_lower_number_stays(option, kept):
    logits = np.array([[[0.0, 3.0, 2.0, -np.inf, 2.0, 2.0, 1.0]]], np.float32)
    found = np.asarray(filter_logits(logits, make_params(option)))[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(found)), kept)
    np.testing.assert_array_equal(found[kept], logits[0, 0, kept])


def test_filters_sort_nothing():
    logits = jnp.zeros((1, 2, 50))
    program = jax.make_jaxpr(sampling.filter_logits)(logits, make_params((1.0, 5, 0.9)))
    assert "sort" not in str(program)
    assert "scatter" not in str(program)


def test_neighbours_do_not_change_what_a_sequence_may_draw():
    """The filters run for a whole batch as soon as one sequence asks for them."""
    both = np.tile(np.linspace(0.0, 40.0, 300, dtype=np.float32), (2, 1, 1))
    alone = filter_logits(both, make_params((1.0, 0, 1.0), (1.0, 0, 1.0)))
    beside = filter_logits(both, make_params((1.0, 0, 1.0), (1.0, 5, 0.9)))
    np.testing.assert_array_equal(alone[0], beside[0])
    assert np.isfinite(beside[1]).sum() == 5


def test_noise_belongs_to_seed_position_and_stream_alone():
    logits = np.tile(normal(VOCAB), (2, 200, 1))
    params = make_two(make_params((1.0, 0, 1.0)))

    def draw(positions, batch_params=params, stream=sampling.COUPLED):
        """Draws one or two rows of positions, in a program for two of 200."""
        padded = np.zeros((2, 200), np.int32)
        padded[: len(positions), : len(positions[0])] = positions
        return np.asarray(sample(logits, padded, batch_params, stream))[:, : len(positions[0])]

    line = draw([list(range(200))])[0]
    # The same in any block and any place of a batch.
    np.testing.assert_array_equal(draw([list(range(63, 70))])[0], line[63:70])
    swapped = jax.tree.map(lambda x: x[::-1], params)
    np.testing.assert_array_equal(draw([[150], [150]], swapped)[1], line[150:151])
    # A tree has siblings at one position.
    assert set(draw([[7, 7, 7]])[0]) == {line[7]}
    # Anything else is other noise.
    other_seed = dataclasses.replace(params, seed=params.seed + 1)
    for other in (
        draw([list(range(200))], other_seed)[0],
        draw([list(range(200, 400))])[0],
        *(draw([list(range(200))], stream=stream)[0] for stream in (1, 2, 3)),
    ):
        assert 0.5 < np.mean(other != line) < 1.0


def make_two(params: SamplingParams) -> SamplingParams:
    """A batch of the sequence and another one."""
    other = dataclasses.replace(params, seed=params.seed + 5, top_k=params.top_k + 3)
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), params, other)


@pytest.mark.parametrize("stream", [sampling.COUPLED, sampling.DRAFT])
@pytest.mark.parametrize("option", [(1.0, 0, 1.0), (0.7, 6, 1.0), (1.3, 0, 0.8), (0.8, 8, 0.9)])
def test_samples_follow_the_distribution(option, stream):
    count = 20_000
    logits = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32)
    positions = np.arange(count, dtype=np.int32)[None]
    rows = np.broadcast_to(logits, (1, count, VOCAB))
    tokens = sample(rows, positions, make_params(option), stream)
    probs = reference_probabilities(logits.astype(np.float64), *option)
    counts = np.bincount(np.asarray(tokens)[0], minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    assert p_value(counts[kept], count * probs[kept]) > 1e-3
    # The same counts must speak against another temperature, or the test is blind.
    flatter = probs**0.8 / (probs**0.8).sum()
    assert p_value(counts[kept], count * flatter[kept]) < 1e-6


candidates = jax.jit(
    lambda logits, positions, params, count, with_probs: SequenceSampler(
        params, with_probs
    ).candidates(logits, positions, count),
    static_argnums=(3, 4),
)


@pytest.mark.parametrize("with_probs", [False, True])
def test_candidates_rank_every_position(with_probs):
    """The first is what would be drawn; greedy ones fall with the logits, filters or not."""
    logits = 2 * normal(3, 40, VOCAB)
    positions = np.tile(np.arange(40), (3, 1))
    params = make_params((0.0, 2, 0.5), (0.8, 0, 1.0), (1.7, 6, 0.95))
    found = jax.tree.map(np.asarray, candidates(logits, positions, params, 5, with_probs))
    stream = sampling.DRAFT if with_probs else sampling.COUPLED
    drawn = sample(logits, positions, params, stream)
    np.testing.assert_array_equal(found.tokens[..., 0], drawn)
    assert (found.scores[..., 1:] <= found.scores[..., :-1]).all()
    assert (found.scores <= 0).all()
    assert all(len(set(row)) == 5 for row in found.tokens.reshape(-1, 5).tolist())
    order = np.argsort(-logits[0], axis=-1)[:, :5]
    np.testing.assert_array_equal(found.tokens[0], order)
    log_probs = np.take_along_axis(scipy.special.log_softmax(logits[0], axis=-1), order, axis=-1)
    np.testing.assert_allclose(found.scores[0], log_probs, atol=1e-5)
    if with_probs:
        np.testing.assert_allclose(found.probs, probabilities(logits, params), atol=1e-6)
        # However the draw fell, scores are those of the likeliest tokens.
        ranked = -np.sort(-found.probs[1:], axis=-1)[..., :5]
        np.testing.assert_allclose(np.exp(found.scores[1:]), ranked, atol=1e-5)
    else:
        assert found.probs is None


@jax.jit
def sample_request(params: SamplingParams, logits, positions):
    """Samples for one request, whose parameters come as the host has them."""
    params = jax.tree.map(lambda x: x[None], params).with_keys()
    return SequenceSampler(params).sample(logits, positions)


@pytest.mark.parametrize("top_k", [0, 3])
def test_extreme_temperatures_are_greedy_or_uniform(top_k):
    """Neither overflows nor vanishes in float32, with and without masked logits."""
    logits, positions = normal(1, 40, VOCAB), np.arange(40)[None]
    logits[..., 0] = -np.inf

    def draw(temperature):
        params = SamplingParams.of(RequestSampling(temperature=temperature, top_k=top_k))
        return np.asarray(sample_request(params, logits, positions))

    np.testing.assert_array_equal(draw(1.2e-38), np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(draw(3e38), draw(1e30))
    assert draw(3e38).min() > 0
    assert len(np.unique(draw(3e38))) > 3


@pytest.mark.parametrize("temperature", [5e-324, 1.2e-38, 5e-38, 1e-20, 9.9e-7])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2}])
def test_tiny_temperatures_are_greedy_also_among_equal_logits(temperature, filters):
    logits = np.zeros((1, 40, VOCAB), np.float32)
    logits[..., VOCAB - 3 :] = 7.0
    params = SamplingParams.of(RequestSampling(temperature=temperature, seed=1, **filters))
    tokens = sample_request(params, logits, np.arange(40)[None])
    assert np.asarray(tokens).tolist() == [[VOCAB - 3] * 40]


def test_seeds_are_64_bit_integers():
    """Every seed has noise of its own; small ones have that of jax's keys."""

    def key(seed, sequence=0):
        sampling = RequestSampling(seed=seed, sequence=sequence)
        params = jax.tree.map(lambda x: x[None], SamplingParams.of(sampling)).with_keys()
        return tuple(np.asarray(params.seed[0]).tolist())

    seeds = (0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), -(2**32))
    assert len({key(seed, sequence) for seed in seeds for sequence in (0, 1)}) == 2 * len(seeds)
    for seed in (0, 7, 2**32 - 1):
        same = jax.random.fold_in(jax.random.key(np.uint32(seed), impl="threefry2x32"), 3)
        assert key(seed, 3) == tuple(jax.random.key_data(same).tolist())


def test_candidates_for_rejection_are_drawn_without_replacement():
    """The law of the first two: q(x) q(y) / (1 - q(x))."""
    count = 20_000
    logits = np.random.default_rng(3).normal(size=5).astype(np.float32)
    rows, positions = np.tile(logits, (1, count, 1)), np.arange(count)[None]
    tokens = np.asarray(candidates(rows, positions, make_params((1.0, 0, 1.0)), 2, True).tokens[0])
    q = reference_probabilities(logits.astype(np.float64), 1.0, 0, 1.0)
    wanted = np.outer(q / (1 - q), q) * (1 - np.eye(5))
    counts = np.bincount(tokens[:, 0] * 5 + tokens[:, 1], minlength=25)
    kept = wanted.ravel() > 0
    assert p_value(counts[kept], count * wanted.ravel()[kept]) > 1e-3
    # The same counts must speak against another order of the two, or the test is blind.
    assert p_value(counts[kept], count * wanted.T.ravel()[kept]) < 1e-6


def test_a_draft_comes_with_the_probabilities_it_was_drawn_with():
    logits, positions = normal(2, 3, VOCAB), np.tile(np.arange(3), (2, 1))
    params = make_params((0.0, 0, 1.0), (0.8, 4, 0.9))

    @functools.partial(jax.jit, static_argnums=0)
    def propose(with_probs):
        return SequenceSampler(params, with_probs).propose(logits, positions)

    tokens, probs = map(np.asarray, propose(True))
    np.testing.assert_allclose(probs, probabilities(logits, params), atol=1e-6)
    assert (np.take_along_axis(probs, tokens[..., None], axis=-1) > 0).all()
    coupled, nothing = propose(False)
    assert nothing is None
    np.testing.assert_array_equal(coupled, sample(logits, positions, params, sampling.COUPLED))


def make_vocabulary(target_ids) -> DraftVocabulary | Shortlist:
    """Of these tokens everywhere; with None, of six others at each of 4 × 40 positions."""
    if target_ids is not None:
        return DraftVocabulary.of(jnp.array(target_ids) - jnp.arange(6), VOCAB)
    order = np.random.default_rng(1).permuted(np.tile(np.arange(VOCAB), (4, 40, 1)), axis=-1)
    return Shortlist(jnp.asarray(order[..., :6], jnp.int32), VOCAB)


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("target_ids", [(1, 2, 4, 7, 8, 10), (7, 1, 10, 2, 8, 4), None])
def test_a_draft_vocabulary_is_as_if_no_other_token_were_likely(target_ids, with_probs):
    """The same tokens, scores and probabilities as from logits of all tokens, -inf elsewhere."""
    vocabulary = make_vocabulary(target_ids)
    logits = 2 * normal(4, 40, 6)
    positions = np.tile(np.arange(40), (4, 1))
    params = make_params((0.0, 0, 1.0), (0.8, 0, 1.0), (1.7, 4, 0.9), (1.0, 0, 1.0, 0.2))

    @jax.jit
    def draw(logits):
        sampler = SequenceSampler(params, with_probs)
        if logits.shape[-1] < VOCAB:
            sampler = sampler.among(vocabulary)
        return sampler.propose(logits, positions), sampler.candidates(logits, positions, 4)

    found, wanted = draw(logits), draw(vocabulary.spread(logits, -jnp.inf))
    drawn = set(np.unique(found[0][0]))
    assert drawn == set(target_ids or range(VOCAB))
    # Candidates that a filter took are never accepted; which of them come last has no meaning.
    likely = np.asarray(wanted[1].scores) > -jnp.inf
    np.testing.assert_array_equal(found[0][0], wanted[0][0])
    np.testing.assert_array_equal(
        np.asarray(found[1].tokens)[likely], np.asarray(wanted[1].tokens)[likely]
    )
    np.testing.assert_allclose(found[1].scores, wanted[1].scores, atol=1e-6)
    for mine, whole in ((found[0][1], wanted[0][1]), (found[1].probs, wanted[1].probs)):
        assert (mine is None) is (whole is None) is not with_probs
        if with_probs:
            assert mine.shape == (4, 40, VOCAB)
            np.testing.assert_allclose(mine, whole, atol=1e-6)
