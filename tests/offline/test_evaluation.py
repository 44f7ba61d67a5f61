"""τ of a drafter under training equals what decoding with its weights has."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from support import engines, models
from support.engines import count_compilations

from dflash import errors
from dflash.config.schema import DecodeConfig
from dflash.drafters.none import NoDrafter
from dflash.offline import evaluation
from dflash.parallel import parameters

STOP_IDS = tuple(range(16, 24))
CONFIG = DecodeConfig(max_new_tokens=12, max_length=64, batch_size=5)
PROMPTS = {
    "short": engines.random_prompts([3, 4, 5]),
    "long": engines.random_prompts([20, 9], seed=1),
}


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Lets every measurement decode its answers with the programs of the shared engine."""

    def build(target, drafter, config, **sizes):
        assert dataclasses.replace(config, max_new_tokens=12) == CONFIG
        assert sizes == {"max_length": 64, "num_stop_ids": len(STOP_IDS)}
        assert isinstance(drafter, NoDrafter)
        return engines.shared_engine("none")

    monkeypatch.setattr(evaluation, "Engine", build)


def make_test(prompts=PROMPTS, **options):
    drafter = models.drafter("dflash", block_size=4)
    config = dataclasses.replace(CONFIG, **options)
    return evaluation.DraftingTest(models.target(), drafter, config, prompts, stop_ids=STOP_IDS)


def draw_params(seed: int):
    drafter = models.drafter("dflash", block_size=4)
    parameters.initialize(drafter, jax.random.key(seed))
    return nnx.state(drafter, nnx.Param), drafter


@pytest.fixture(scope="module")
def drafting_test():
    return make_test()


def test_it_measures_what_decoding_has(drafting_test):
    params, drafter = draw_params(2)
    metrics = drafting_test(params)
    run = engines.redrafted(engines.shared_engine("dflash"), drafter)
    lengths = {
        name: [
            n
            for one in engines.decode(run, some, 12, stop_ids=STOP_IDS)
            for n in one.acceptance_lengths
        ]
        for name, some in PROMPTS.items()
    }
    assert metrics.keys() == {"tau", "tau/short", "tau/long"}
    for name, found in lengths.items():
        assert metrics[f"tau/{name}"] == pytest.approx(np.mean(found))
    assert metrics["tau"] == pytest.approx(np.mean(lengths["short"] + lengths["long"]))


def test_nothing_is_compiled_twice(drafting_test):
    first, second = (draw_params(seed)[0] for seed in (3, 4))
    drafting_test(first)
    with count_compilations() as compilations:
        drafting_test(second)
    assert compilations == []


def test_without_cycles_there_is_no_tau():
    assert make_test(max_new_tokens=1)(draw_params(1)[0]) == {}


def test_what_is_unusable_is_found_before_training():
    with pytest.raises(errors.InputError, match="outside the vocabulary"):
        make_test({"bad": [(1, 999)]})
    with pytest.raises(errors.ConfigError, match=r"decode\.repetition_penalty: is not supp"):
        make_test(temperature=1.0, repetition_penalty=1.1)
