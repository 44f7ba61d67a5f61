"""Survival estimates: reliability, calibration, and what dividing rows by them commits."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dflash import errors
from dflash.config import benchmark_schema, loader
from dflash.inference.cycle import choice
from dflash.inference.replay import Cycles
from dflash.measure import workload
from experiments.acceptance import estimates as survival
from experiments.acceptance import survival as study
from experiments.acceptance.estimates import Drafts

NAMES = ("strategy", "estimate", "low", "predicted", "observed", "drafts", "calibration_error")


def cycles(committed, left=100, confidence=None):
    """Cycles [B, C] with the same number of tokens left, or those given."""
    committed = np.asarray(committed, np.int32)
    return Cycles(committed, np.broadcast_to(np.int32(left), committed.shape), confidence)


def drawn(number, drafts):
    """Rates of many cycles, and drafts that are accepted with these chances."""
    generator = np.random.default_rng(0)
    rates = generator.uniform(0.3, 0.99, (number, drafts))
    accepted = np.cumprod(generator.uniform(size=rates.shape) < rates, axis=1).astype(bool)
    return rates, Drafts(np.ones_like(accepted), accepted)


def test_drafts_past_the_end_of_a_text_count_nothing():
    found = survival.drafts_of(cycles([[3, 1, 0]], [[9, 3, 0]]), 3)
    assert found.counted.tolist() == [[True] * 3, [True, True, False], [False] * 3]
    assert found.accepted.tolist() == [[True, True, False], [False] * 3, [False] * 3]


def test_bins_compare_predicted_with_observed_survival():
    rates = np.array([[0.2, 1.0], [0.6, 0.5], [0.64, 0.9]])
    accepted = np.array([[False, False], [True, False], [True, True]])
    counted = np.array([[True, False], [True, True], [True, True]])
    found = survival.reliability(rates, Drafts(counted, accepted), 2)
    low, high = found
    assert (low.low, low.drafts, high.low, high.drafts) == (0.0, 2, 0.5, 3)
    assert (low.predicted, low.observed) == (pytest.approx((0.2 + 0.3) / 2), 0.0)
    assert (high.predicted, high.observed) == (pytest.approx((0.6 + 0.64 + 0.576) / 3), 1.0)
    wanted = (2 * 0.25 + 3 * (1 - high.predicted)) / 5
    assert survival.calibration_error(found) == pytest.approx(wanted)


def test_temperatures_undo_confidence_that_is_too_strong_or_too_weak():
    rates, drafts = drawn(20_000, 4)
    scales = np.array([2.0, 1.0, 0.5, 3.0])
    stated = survival.calibrated(rates, 1 / scales)
    fitted = survival.fit_temperatures(stated, drafts)
    np.testing.assert_allclose(fitted, scales, rtol=0.1)
    before, after = (
        survival.calibration_error(survival.reliability(some, drafts))
        for some in (stated, survival.calibrated(stated, fitted))
    )
    assert after < 0.01 < 0.04 < before
    assert survival.squared_error(rates, drafts) < survival.squared_error(stated, drafts)


def test_a_position_without_drafts_is_left_alone():
    rates, drafts = drawn(2_000, 2)
    unknown = drafts._replace(counted=drafts.counted & np.array([True, False]))
    assert survival.fit_temperatures(rates, unknown)[1] == 1.0


def test_online_rates_are_those_of_the_cycles_before():
    found = survival.online_rates(cycles([[3, 3], [1, 1]]), 2)
    assert found.shape == (2, 2, 2)
    np.testing.assert_allclose(found[:, 0], choice.PRIOR)
    assert (found[0, 1] > found[1, 1]).all(), "each text has statistics of its own"
    assert found[1, 1, 0] < choice.PRIOR


def test_rows_are_divided_by_the_rates():
    """Two texts, one of which accepts everything; four rows are two anchors and two drafts."""
    some = cycles([[4] * 5, [1] * 5])
    known = np.zeros((2, 5, 3))
    known[0] = 1.0
    assert survival.divided_tokens(known, some, 2) == (3 + 1) / 2
    assert survival.divided_tokens(np.full((2, 5, 3), 0.5), some, 2) == (2 + 1) / 2
    assert survival.divided_tokens(1 - known, some, 2) == 1.0


CONFIG = """
target: {checkpoint: assets/tiny_target}
strategies:
  dflash: {checkpoint: assets/tiny_dflash}
  dspark:
    checkpoint: random
    architecture: {num_hidden_layers: 1, block_size: 5, mask_token_id: 6, markov_rank: 8,
                   num_target_features: 1, head_dim: 64}
tasks: [math, code]
prompts_per_task: 1
decode: {max_new_tokens: 12}
dtype: float32
"""


def load(tmp_path, *overrides):
    path = tmp_path / "config.yml"
    path.write_text(CONFIG)
    return loader.load(str(path), overrides, benchmark_schema.BenchmarkRun)


def test_the_study_compares_both_estimates(tmp_path):
    steps = list(study.survival(load(tmp_path), tmp_path))
    result, done = steps[-1].result, [step.done for step in steps]
    assert done == sorted(done)
    assert done[-1] == 1
    kinds = list(dict.fromkeys((row["strategy"], row["estimate"]) for row in result.rows))
    heads = [("dspark", name) for name in ("online", "head", "head, calibrated")]
    assert kinds == [("dflash", "online"), *heads]
    for row in result.rows:
        assert set(NAMES) < set(row)
        assert row["low"] <= row["predicted"] <= row["low"] + 0.1 + 1e-6
        assert 0 <= row["observed"] <= 1
    counts = dict.fromkeys(kinds, 0)
    for row in result.rows:
        counts[row["strategy"], row["estimate"]] += row["drafts"]
    assert counts["dspark", "head"] == counts["dspark", "online"] > 0
    assert [line.name for line in result.lines] == [", ".join(kind) for kind in kinds]
    (key,) = [note for note in result.notes if "confidence_temperatures" in note]
    assert key.startswith("dspark: drafter.confidence_temperatures=[")
    assert len(key.split(",")) == 5
    assert jnp.isfinite(result.rows[0]["tokens_4"])
    check_traces(tmp_path)


def check_traces(tmp_path):
    """Both strategies decode the same texts; only one has confidence."""
    sums = []
    for name in ("trace_dflash.json", "trace_dspark.json"):
        trace = workload.read_trace(str(tmp_path / name))
        assert list(trace) == ["math", "code"]
        prompts = [prompt for task in trace.values() for prompt in task]
        sums.append([sum(prompt.lengths) for prompt in prompts])
        stated = [row.get("confidence") for row in json.loads((tmp_path / name).read_text())]
        shapes = [rows and np.shape(rows) for rows in stated]
        lengths = [len(one.lengths) for one in prompts]
        assert shapes == ([(n, 5) for n in lengths] if "dspark" in name else [None, None])
    assert sums[0] == sums[1]
    assert max(sums[0]) == 11, "all tokens but the first"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decode.temperature=0.7"], "decode.temperature: survival replays greedy decoding"),
        (["acceptance=[gsm8k]"], "survival measures what is accepted"),
        (["strategies.dflash.tree.budget=8"], "strategies.dflash: survival replays chains"),
    ],
)
def test_what_cannot_be_replayed_is_rejected(tmp_path, overrides, message):
    with pytest.raises(errors.ConfigError, match=message):
        list(study.survival(load(tmp_path, *overrides), tmp_path))


def test_a_study_of_no_strategy_is_rejected(tmp_path):
    config = dataclasses.replace(load(tmp_path), strategies={})
    with pytest.raises(errors.ConfigError, match="strategies: survival needs at least one"):
        list(study.survival(config, tmp_path))
