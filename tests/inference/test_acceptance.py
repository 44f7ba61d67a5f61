"""τ on recorded answers is that of the engine that recorded them."""

import jax
import numpy as np
import pytest
from flax import nnx
from support import engines, models
from support.engines import count_compilations
from support.forms import Form, each_kind

from dflash import errors
from dflash.config.schema import DecodeConfig
from dflash.inference import acceptance
from dflash.inference.acceptance import AnswersTest
from dflash.inference.replay import Text
from dflash.parallel import parameters

LENGTHS, LIMITS = (16, 9, 31, 12, 13, 32, 11), (20, 1, 32, 7, 2, 13, 25)


def record(run, prompts, limits, **options):
    """Returns the answers of a run, and the lengths of its cycles."""
    done = engines.decode(run, prompts, limits, **options)
    answers = [Text(p, one.output_ids) for p, one in zip(prompts, done, strict=True)]
    return answers, [one.acceptance_lengths for one in done]


def tau(lengths) -> float:
    return np.mean([length for one in lengths for length in one])


def make_test(form: Form, answers, *config, **options) -> AnswersTest:
    return AnswersTest(models.target(), form.build(), answers, *config, **options)


@each_kind
def test_greedy_answers_take_the_cycles_of_the_engine(form):
    run = engines.shared_engine(form.name, tree=form.tree)
    prompts = engines.random_prompts(LENGTHS)
    answers, lengths = record(run, prompts, LIMITS, stop_ids=(3, 9))
    test = make_test(form, {"a": answers[:3], "b": answers[3:]}, batch_size=4)
    found = test(nnx.state(run.drafter))
    assert found == pytest.approx(
        {"tau": tau(lengths), "tau/a": tau(lengths[:3]), "tau/b": tau(lengths[3:])}
    )


@pytest.mark.parametrize(("name", "verify"), [("dflash", "coupled"), ("dflash2", "rejection")])
def test_drawn_answers_take_the_cycles_that_are_expected_of_the_engine(name, verify):
    options = {"temperature": 0.8, "top_k": 8}
    prompts = engines.random_prompts([9 + n % 7 for n in range(400)])
    run = engines.shared_engine(name, verify=verify)
    answers, lengths = record(run, prompts, 16, **options)
    test = make_test(Form(name), {"all": answers}, DecodeConfig(verify=verify, **options))
    assert test(nnx.state(run.drafter))["tau"] == pytest.approx(tau(lengths), rel=0.01)


def test_other_weights_compile_nothing_and_score_otherwise():
    form, scores = Form("dflash"), []
    answers, _ = record(engines.shared_engine("dflash"), engines.random_prompts(LENGTHS), LIMITS)
    test = make_test(form, {"all": answers})
    test(nnx.state(form.build()))
    with count_compilations() as compilations:
        for seed in (3, 4):
            drafter = form.build()
            parameters.initialize(drafter, jax.random.key(seed))
            scores.append(test(nnx.state(drafter))["tau"])
    assert compilations == []
    assert scores[0] != scores[1]


def test_single_tokens_have_no_tau():
    assert make_test(Form("dflash"), {"all": [Text((1, 2), (3,))]})({}) == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Text((1,), (2, 999)), "answer 1: token 999 is outside the vocabulary of 24 tokens"),
        (Text((), (2, 3)), "answer 1: its prompt or the answer itself is empty"),
    ],
)
def test_unusable_answers(answer, message):
    with pytest.raises(errors.InputError, match=message):
        make_test(Form("dflash"), {"all": [Text((1,), (2,)), answer]})


@pytest.mark.parametrize(
    ("options", "tree", "message"),
    [
        ({}, True, "τ of trees is computed at temperature 0 only"),
        ({"repetition_penalty": 1.1}, False, "decode.repetition_penalty: is not supported"),
    ],
)
def test_unknown_chances(options, tree, message):
    form = Form("dflash", tree=tree)
    with pytest.raises(errors.ConfigError, match=message):
        make_test(form, {}, DecodeConfig(temperature=1.0, **options))
    make_test(form, {}, DecodeConfig(**options))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_the_chance_is_that_of_shared_noise(rng):
    p, q = log_softmax(rng.normal(size=(2, 5)) * 1.5)
    q[3] = -np.inf  # A token that the drafter cannot draw.
    noise = rng.gumbel(size=(400_000, 5))
    of_target, of_drafter = (np.argmax(noise + x, axis=1) for x in (p, q))
    for token in range(5):
        wanted = np.mean(of_drafter[of_target == token] == token)
        found = float(acceptance.coupled_chance(p, q, np.int32(token)))
        assert found == pytest.approx(wanted, abs=0.005)


def test_the_chance_of_rejection_is_that_of_an_accepted_token(rng):
    p, q = log_softmax(rng.normal(size=(2, 5)))
    q[3] = -np.inf
    chances = acceptance.rejection_chance(np.tile(p, (5, 1)), np.tile(q, (5, 1)), np.arange(5))
    np.testing.assert_allclose(np.exp(p) * chances, np.exp(np.minimum(p, q)), rtol=1e-5)


def test_the_chance_of_the_same_distribution_is_one(rng):
    p = log_softmax(rng.normal(size=(5, 5)))
    p[:, 0] = -np.inf
    chances = acceptance.coupled_chance(p, p, np.arange(5) % 4 + 1)
    np.testing.assert_allclose(chances, 1.0, rtol=1e-6)
