"""Tests of speed-up forecasts against figures computed by hand."""

import pytest

from dflash.compiler import forecast_table
from dflash.compiler.forecast import (
    LIMITS,
    PLAIN,
    CompiledCost,
    DeviceMemory,
    Forecast,
    StrategyPoint,
)

GB = 10**9


def cost(weights=0.0, context=0.0, cycles=0.0, arithmetic=0.0):
    limits = dict.fromkeys(LIMITS, 0.0)
    return CompiledCost(
        limits | {"weights": weights, "context": context, "arithmetic": arithmetic}, cycles
    )


def point(name, batch, rows, fixed, per_token=0.0, gigabytes=10.0):
    memory = DeviceMemory(gigabytes * GB, 0.001 * GB * batch)
    return StrategyPoint(
        name, batch, rows, fixed, cost(context=per_token, cycles=per_token), memory, {}
    )


# A plain cycle takes 4 ms; at batch 8, 1,000 tokens of context add 1 ms.
POINTS = (
    point(PLAIN, 1, 1, cost(4.0, cycles=5.0)),
    point(PLAIN, 8, 1, cost(4.0, cycles=5.0), 0.001),
    point("block_4", 1, 4, cost(4.5, cycles=6.0)),
    point("block_4", 8, 4, cost(5.0, cycles=6.0), 0.001),
    point("block_16", 1, 16, cost(5.0, cycles=8.0)),
    point("block_16", 8, 16, cost(4.0, arithmetic=20.0, cycles=30.0), 0.001, gigabytes=90.0),
    point("other", 1, 8, cost(6.0, cycles=7.0)),
    point("other", 8, 8, cost(6.0, cycles=7.0)),
)
TOKENS = {"block_4": {"math": 3.0, "chat": 2.0}, "block_16": {"math": 5.0, "chat": 2.1}}


@pytest.fixture
def found():
    return Forecast({(one.strategy, one.batch): one for one in POINTS}, TOKENS, 95 * GB)


def test_a_speedup_is_tau_times_the_ratio_of_costs(found):
    one = found.expected("block_16", "math", 1, 0)
    assert one.speedup == pytest.approx(5.0 * 4.0 / 5.0)
    assert one.by_cycles == pytest.approx(5.0 * 5.0 / 8.0)
    assert one.tokens_per_s == pytest.approx(1000.0)  # 5 tokens in 5 ms
    assert found.expected(PLAIN, "math", 1, 0).speedup == 1.0


def test_costs_are_linear_in_the_context(found):
    # A plain cycle takes 4 + 1 ms, a block cycle 5 + 1 ms.
    assert found.expected("block_4", "math", 8, 1000).speedup == pytest.approx(3.0 * 5 / 6)
    assert found.points["block_4", 8].cost(1000).limits["context"] == pytest.approx(1.0)


def test_the_best_choice_depends_on_the_task_and_the_batch(found):
    assert found.best("math", 1, 0).strategy == "block_16"
    assert found.best("chat", 1, 0).strategy == "block_4"
    # The arithmetic takes 20 ms, so the speed-up is 5 × 4 / 24.
    assert found.expected("block_16", "math", 8, 0).speedup == pytest.approx(20 / 24)
    assert found.best("math", 8, 0).strategy == "block_4"
    assert found.best_on_average(1, 0) == ("block_16", pytest.approx((4.0 + 2.1 * 0.8) / 2))


def test_strategies_that_do_not_fit_are_excluded(found):
    # The strategy needs 90 GB and 8 MB for each token of context and each of its 16 rows.
    assert found.fits("block_16", 8, 600)
    assert not found.fits("block_16", 8, 610)
    assert found.expected("block_16", "math", 8, 610) is None
    assert found.mean("block_16", 8, 610) is None
    assert found.best("math", 8, 20_000) is None
    assert found.best_on_average(8, 20_000) is None


def test_the_acceptance_that_a_strategy_needs(found):
    assert found.expected("other", "math", 1, 0) is None
    assert found.mean("other", 1, 0) is None
    assert found.needed_tokens("other", 1, 0) == pytest.approx(1.5)
    assert found.needed_tokens("other", 1, 0, speedup=2.0) == pytest.approx(3.0)


def test_the_text_labels_expectations_and_slow_downs(found):
    text = forecast_table.lines(found, [0, 20_000])
    assert all("expected" in line for line in text if line and not line.startswith(" "))
    everything = "\n".join(text)
    assert "block_16 is expected to be SLOWER than plain decoding at batch 8 after 0" in everything
    assert "arithmetic 83 %" in everything
    assert "does NOT fit" in everything
    assert ["math", "4.00×", "block_16", "2.40×", "block_4"] in [line.split() for line in text]
    # "other" takes 6 ms instead of 4 ms; the best mean speed-up is 2.84.
    assert f"1.50 / {1.5 * 2.84:.2f}" in everything
    assert text[-1].split() == ["other", "1.50", "/", "4.26", "0.25"]


def test_plain_decoding_is_the_choice_if_drafting_does_not_pay(found):
    slow = Forecast(found.points, {"block_16": {"math": 1.1}}, found.capacity_bytes)
    assert slow.best("math", 1, 0).strategy == PLAIN
    text = "\n".join(forecast_table.lines(slow, [0]))
    assert "drafting is not expected to pay on average at batch 1, 8" in text


def test_a_strategy_may_lack_a_batch_size(found):
    """A single sequence has nothing to divide its rows with."""
    points = {key: one for key, one in found.points.items() if key != ("other", 1)}
    some = Forecast(points, found.tokens, found.capacity_bytes)
    assert not some.fits("other", 1, 0)
    assert some.needed_tokens("other", 1, 0) is None
    words = [line.split() for line in forecast_table.lines(some, [0])]
    assert [line[0] for line in words if line[1:2] == ["other"]] == ["8"]
    assert words[-1] == ["other", "–", "1.50", "/", "3.00"]
    assert len(forecast_table.to_json(some, [0])["cells"]) == len(points)


def test_without_acceptance_only_costs_are_reported(found):
    bare = Forecast(found.points, {}, found.capacity_bytes)
    text = "\n".join(forecast_table.lines(bare, [0]))
    assert "no expected speed-ups: no strategy has known acceptance" in text
    assert "block_16" in text


def test_the_json_matches_the_text(found):
    values = forecast_table.to_json(found, [0])
    assert values["label"] == forecast_table.LABEL
    cell = next(
        one for one in values["cells"] if (one["strategy"], one["batch"]) == ("block_16", 1)
    )
    assert (cell["roofline_ms"], cell["cycles_ms"], cell["fits"]) == (5.0, 8.0, True)
    assert cell["expected"]["math"]["speedup"] == pytest.approx(4.0)
    assert {one["strategy"] for one in values["best"] if one["batch"] == 8} == {"block_4"}
