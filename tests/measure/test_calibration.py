"""Calibration: what is fitted to drafts, how far chances are from shares, and what is stored."""

import json
import shutil

import numpy as np
import pytest
import scipy.special

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.drafters.parts import calibration as calibrations
from dflash.loading import job as jobs
from dflash.measure.studies import calibration as study
from dflash.measure.studies.calibration import Outcomes

TRUE = (0.67, -0.46), (1.5, 0.3), (0.4, -1.0)


def drawn(number, seed=0):
    """Drafts whose chances of acceptance follow `TRUE` from what is stated."""
    generator = np.random.default_rng(seed)
    depth = generator.integers(1, 12, number)
    odds = generator.normal(scale=3, size=number)
    pairs = np.array([TRUE[i] for i in np.minimum(np.log2(depth).astype(int), 2)])
    chance = scipy.special.expit(pairs[:, 0] * odds + pairs[:, 1])
    return Outcomes(depth, odds, generator.uniform(size=number) < chance)


def test_the_numbers_that_chances_follow_are_found():
    fitted = study.fit(drawn(40_000))
    assert len(fitted) == 4, "depths 1, 2 … 3, 4 … 7 and 8 … 11"
    np.testing.assert_allclose(fitted, (*TRUE, TRUE[-1]), atol=0.07)
    held_out = drawn(40_000, seed=1)
    chances = (study.chances(held_out, pairs) for pairs in (calibrations.IDENTITY, fitted))
    before, after = (
        study.calibration_error(study.reliability(chance, held_out.accepted)) for chance in chances
    )
    assert after < 0.01 < 0.1 < before


@pytest.mark.parametrize(("accepted", "slope"), [([True] * 4, None), ([True, False] * 2, 0.05)])
def test_few_drafts_change_little_and_chances_rise_with_scores(accepted, slope):
    odds = np.array([-4.0, 4.0, -4.0, 4.0])
    ((a, b),) = study.fit(Outcomes(np.ones(4, int), odds, np.array(accepted)))
    assert a == slope if slope else 0 < a < 1.5
    assert abs(b) < 2


def test_groups_without_drafts_stay_as_they_are():
    depth, certain = np.array([1, 4]), np.zeros(2)
    fitted = study.fit(Outcomes(depth, certain, np.array([True, False])))
    assert fitted[1] == (1.0, 0.0)


def test_bins_compare_predicted_with_observed_chances():
    chance, accepted = np.array([0.1, 0.3, 0.6, 1.0]), np.array([False, True, True, True])
    low, high = study.reliability(chance, accepted, 2)
    assert low == (0.0, pytest.approx(0.2), 0.5, 2)
    assert high == (0.5, pytest.approx(0.8), 1.0, 2)
    assert study.calibration_error([low, high]) == pytest.approx((2 * 0.3 + 2 * 0.2) / 4)


def test_log_chances_are_those_of_the_formula():
    probs = np.array([[1e-12, 0.2, 0.7, 1.0], [0.0, 0.1, 0.5, 0.9]], np.float32)
    with np.errstate(divide="ignore"):
        scores = np.log(probs)
    pairs = calibrations.by_depth(TRUE, 2)
    found = calibrations.log_chances(scores, pairs)
    odds = scipy.special.logit(np.minimum(probs, 1 - 1e-6).astype(np.float64))
    wanted = scipy.special.expit(pairs[:, :1] * odds + pairs[:, 1:])
    np.testing.assert_allclose(np.exp(found), wanted, rtol=1e-2)
    np.testing.assert_allclose(np.exp(found)[:, 1:3], wanted[:, 1:3], rtol=1e-5)
    assert (np.diff(found, axis=1) > 0).all()


CONFIG = """
target: {checkpoint: assets/tiny_target}
drafter: {name: dflash2, checkpoint: assets/tiny_dflash2}
tasks: [math]
prompts_per_task: 2
decode: {max_new_tokens: 8}
dtype: float32
study: {name: calibration}
"""


def load(tmp_path, *overrides):
    path = tmp_path / "config.yml"
    path.write_text(CONFIG)
    return loader.load(str(path), overrides, BenchmarkRun)


def copied_drafter(tmp_path, **fields):
    """Returns a copy of the tiny drafter, with more fields in its config.json."""
    folder = tmp_path / "drafter"
    shutil.copytree(checkpoint.resolve("assets/tiny_dflash2"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def test_calibrations_are_stored_and_read(tmp_path):
    folder = copied_drafter(tmp_path)
    forms = f"drafter.checkpoint={folder}", "strategies={a: {}, b: {tree: {budget: 8}}}"
    config = load(tmp_path, *forms, "study.store=true")
    result = list(study.calibration(config))[-1].result
    kinds = list(dict.fromkeys((row["strategy"], row["chance"]) for row in result.rows))
    assert kinds == [(name, kind) for name in "ab" for kind in ("stated", "calibrated")]
    stored = json.loads((folder / "config.json").read_text())["calibration"]
    assert f'b: "calibration": {stored}' in result.notes
    found = jobs.prepare_models(config.decode_run(config.strategies["b"])).drafter
    assert found.calibration == tuple(map(tuple, stored))


def test_files_state_pairs(tmp_path):
    folder = copied_drafter(tmp_path, calibration=[[-1.0, 0.0]])
    config = load(tmp_path, f"drafter.checkpoint={folder}", "strategies={a: {}}")
    with pytest.raises(errors.CheckpointError, match="calibration: expected pairs of a positive"):
        jobs.prepare_models(config.decode_run(config.strategies["a"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decode.temperature=0.7"], "decode.temperature: calibration replays greedy decoding"),
        (["strategies={a: {name: ngram}}"], r"strategies\.a: this strategy has no calibration"),
        (["strategies={a: {name: dflash, checkpoint: assets/tiny_dflash}}"],
         r"strategies\.a: its chains state no confidence; add tree\.budget"),
        (["strategies={a: {checkpoint: random}}", "study.store=true"],
         r"study\.store: strategies\.a has no checkpoint in a local directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_calibrated_is_rejected(tmp_path, overrides, message):
    overrides = ["strategies={a: {}}", *overrides]
    with pytest.raises(errors.ConfigError, match=message):
        list(study.calibration(load(tmp_path, *overrides)))
