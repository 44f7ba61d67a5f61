import pytest

from experiments.forecast import __main__ as forecast_run
from experiments.forecast.costs import (
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
        name, batch, rows, fixed, cost(context=per_token, cycles=per_token), memory
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


@pytest.fixture
def found():
    return Forecast({(one.strategy, one.batch): one for one in POINTS}, 95 * GB)


def test_drafting_pays_where_tau_exceeds_the_ratio_of_costs(found):
    assert found.over_plain(found.points["block_16", 1], 0) == pytest.approx(5.0 / 4.0)
    assert found.over_plain(found.points["block_16", 8], 0) == pytest.approx(24.0 / 4.0)
    assert found.over_plain(found.points[PLAIN, 1], 0) == 1.0


def test_costs_are_linear_in_the_context(found):
    # A plain cycle takes 4 + 1 ms, a block cycle 5 + 1 ms.
    assert found.over_plain(found.points["block_4", 8], 1000) == pytest.approx(6 / 5)
    assert found.points["block_4", 8].cost(1000).limits["context"] == pytest.approx(1.0)


def test_strategies_that_do_not_fit_are_named(found):
    # The strategy needs 90 GB and 8 MB for each token of context and each of its 16 rows.
    point = found.points["block_16", 8]
    assert found.fits(point, 600)
    assert not found.fits(point, 610)
    assert "does NOT fit" in "\n".join(forecast_run.lines(found, [610]))


def test_the_table_says_that_costs_are_expected(found):
    text = forecast_run.lines(found, [0, 20_000])
    assert all("expected" in line for line in text if line and not line.startswith(" "))
    rows = [" ".join(line.split()) for line in text]
    assert "8 block_16 16 24.00 30.00 6.00 arithmetic 83 % 90.1 GB" in rows


def test_the_json_matches_the_text(found):
    values = forecast_run.to_json(found, [0])
    assert values["label"] == forecast_run.LABEL
    cell = next(
        one for one in values["cells"] if (one["strategy"], one["batch"]) == ("block_16", 1)
    )
    assert (cell["roofline_ms"], cell["cycles_ms"], cell["fits"]) == (5.0, 8.0, True)
    assert cell["over_plain"] == pytest.approx(1.25)
