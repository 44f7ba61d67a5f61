"""Forecasts, warnings and early stopping from evaluations."""

import pytest

from dflash.training import evaluation


def history(*rows):
    """Evaluations of (loss, τ, expected τ), a hundred steps apart."""
    return [
        evaluation.entry(
            100 * (i + 1), tau, {"loss": loss, "tau": tau, "acceptance_length": expected}
        )
        for i, (loss, tau, expected) in enumerate(rows)
    ]


def test_the_speed_up_to_expect_is_at_most_tau_over_what_is_read():
    metrics = {"loss": 1.0, "acceptance_length": 2.5, "tau": 3.0}
    assert evaluation.forecast(metrics, 1.2) == {"speedup_bound": pytest.approx(2.5)}
    assert evaluation.forecast({"acceptance_length": 2.4}, 1.2) == {"speedup_bound": 2.0}
    assert evaluation.forecast({"loss": 1.0}, 1.2) == {}
    assert evaluation.forecast(metrics, None) == {}


@pytest.mark.parametrize(
    ("scores", "patience", "stalled"),
    [
        ((1, 2, 2, 1), 2, True),
        ((1, 2, 1, 3), 2, False),
        ((3, 2, 1), 3, False),  # the first one counts as a new best
        ((3, 2, 1, 1), 3, True),
        ((3, 2, 1, 1), 0, False),
        ((), 1, False),
    ],
)
def test_it_has_stalled_when_patience_is_at_its_end(scores, patience, stalled):
    entries = [evaluation.entry(i, score, {}) for i, score in enumerate(scores)]
    assert evaluation.has_stalled(entries, patience) is stalled


def test_a_loss_that_falls_while_tau_does_not_is_called_out():
    rows = [(2.0, 3.0, 3.0), (1.9, 3.01, 3.0), (1.8, 2.9, 3.0), (1.7, 3.0, 3.0)]
    (line,) = evaluation.warnings(history(*rows))
    assert line.startswith("the held-out loss falls (2.000 to 1.700 since step 100), but τ does")
    assert evaluation.warnings(history(*rows[:3])) == [], "too early to say"
    assert evaluation.warnings(history(*rows[:3], (1.7, 3.2, 3.0))) == []
    assert evaluation.warnings(history(*((2.0, 3.0, 3.0),) * 4)) == []


def test_a_tau_far_from_the_expected_one_is_called_out():
    (line,) = evaluation.warnings(history((2.0, 1.2, 4.0)))
    assert line.startswith("τ is 1.20 in the decode engine, but 4.00 is expected")
    assert evaluation.warnings(history((2.0, 3.0, 4.0))) == []


def test_a_target_has_no_tau_and_no_warnings():
    assert evaluation.warnings([evaluation.entry(1, -2.0, {"loss": 2.0})] * 5) == []
    assert evaluation.warnings([]) == []
