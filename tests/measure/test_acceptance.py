"""Tests of acceptance that is known before a run: τ, and where it is read from."""

import json

import pytest

from dflash import errors
from dflash.measure import acceptance, published
from dflash.measure.acceptance import DraftShape


@pytest.mark.parametrize(("rows", "tau"), [(1, 1.0), (2, 1.75), (3, 2.0), (4, 2.25), (9, 2.25)])
def test_tau_of_a_shorter_block(rows, tau):
    """Of four cycles one each commits 1, 2, 2 and 4 tokens."""
    assert acceptance.tau([1, 2, 0, 1], rows) == pytest.approx(tau)


def test_what_is_published_by_strategy():
    known = acceptance.read(None)
    shapes = {
        "whole": DraftShape("dflash", 16),
        "cut": DraftShape("dflash", 4),
        "tree": DraftShape("dflash", 33, 32),
        "large": DraftShape("dflash", 65, 64),
        "wide": DraftShape("dflash", 32),
        "other": DraftShape("eagle3", 8),
    }
    found = acceptance.expected(known, shapes, "dflash")
    assert set(found) == {"whole", "cut", "tree"}
    assert set(found["whole"].tokens) == set(published.PORT)
    # The sums of the published files, see their source.
    assert found["whole"].tokens["math500"] == pytest.approx(7.847, abs=2e-3)
    assert found["whole"].tokens["alpaca"] == pytest.approx(3.146, abs=2e-3)
    shares = published.HISTOGRAMS["gsm8k"]
    by_hand = shares[0] + 2 * shares[1] + 3 * shares[2] + 4 * sum(shares[3:])
    assert found["cut"].tokens["gsm8k"] == pytest.approx(by_hand, abs=1e-3)
    assert "blocks of 16 cut to 4" in found["cut"].source
    whole = found["whole"].tokens["mbpp"]
    assert found["tree"].tokens["mbpp"] == pytest.approx(1.22 * whole)
    assert found["tree"].source.startswith("assumed: 1.22 times τ")


def write(path, content):
    path.write_text(json.dumps(content))
    return str(path)


def test_a_trace_is_of_the_config_s_own_drafter(tmp_path):
    rows = [
        {"dataset": "a", "acceptance_lengths": [1, 4, 1]},
        {"dataset": "a", "acceptance_lengths": [2]},
        {"acceptance_lengths": [3]},
    ]
    known = acceptance.read(write(tmp_path / "trace.json", rows))
    shapes = {
        "own": DraftShape("medusa", 4),
        "tree": DraftShape("medusa", 33, 32),
        "x": DraftShape("dflash", 4),
    }
    found = acceptance.expected(known, shapes, "medusa")
    # Nothing is assumed of a tree whose chain was recorded here.
    assert set(found) == {"own"}
    assert found["own"].tokens == {"a": 2.0, "trace": 3.0}


def test_a_benchmark_says_whose_acceptance_it_is(tmp_path):
    cells = [
        {"task": "a", "strategy": "none", "cycles": 9, "acceptance_histogram": {"1": 9}},
        {"task": "a", "strategy": "tree", "cycles": 4, "acceptance_histogram": {"1": 1, "3": 3}},
        {"task": "b", "strategy": "tree", "cycles": 0, "acceptance_histogram": {}},
    ]
    known = acceptance.read(write(tmp_path / "results.json", {"cells": cells}))
    shapes = {"tree": DraftShape("medusa", 33, 32), "chain": DraftShape("medusa", 4)}
    found = acceptance.expected(known, shapes, "medusa")
    assert {name: one.tokens for name, one in found.items()} == {"tree": {"a": 2.5}}


def test_a_decode_run_is_one_task(tmp_path):
    folder = tmp_path / "yesterday"
    folder.mkdir()
    path = write(folder / "summary.json", {"acceptance_histogram": {"1": 2, "2": 0, "3": 2}})
    found = acceptance.expected(acceptance.read(path), {"x": DraftShape("dflash", 2)}, "dflash")
    assert found["x"].tokens == {"yesterday": 1.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not JSON"),
        ("3", "expected a trace, results.json of a benchmark, or summary.json"),
        ('{"cells": [3]}', "cells: not in the format of a benchmark"),
        ('{"acceptance_histogram": {"0": 1}}', "expected numbers of cycles by length, from 1"),
        ('{"acceptance_histogram": {"1": 0}}', "expected numbers of cycles by length, from 1"),
        ("[{}]", "expected an object with acceptance_lengths"),
    ],
)
def test_what_is_no_acceptance_is_named(tmp_path, text, message):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(errors.InputError, match=message):
        acceptance.read(str(path))


def test_the_published_figures_average_to_the_published_averages():
    port = published.PORT.values()
    assert sum(one.tau for one in port) / 9 == pytest.approx(5.42, abs=0.005)
    assert sum(one.speedup for one in port) / 9 == pytest.approx(3.13, abs=0.005)
    assert sum(one.plain_ms for one in port) / 9 == pytest.approx(7.30, abs=0.005)
    assert sum(one.token_ms for one in port) / 9 == pytest.approx(2.66, abs=0.01)


def test_expected_beside_measured():
    tokens = {"gsm8k": 6.0, "alpaca": 3.0, "mine": 9.0}
    text = published.beside(
        "block 16", tokens, published.CycleTimes(4.0, 5.0), published.CycleTimes(5.0, 7.5)
    )
    lines = [line.split() for line in text]
    # τ over 1.25 and over 1.5; their τ over 1.25.
    assert ["gsm8k", "6.00", "4.80×", "4.00×", "5.40", "4.32×", "3.17×"] in lines
    assert ["mean", "4.50", "3.60×", "3.00×", "4.13", "3.30×", "2.41×"] in lines
    assert not any("mine" in line for line in lines)
    ratios = "a cycle over a plain token: expected 1.25 by roofline, 1.50 by cycles; measured 1.70"
    assert any(ratios in line for line in text)
