"""Tests of the measurements on a chip, end to end on a tiny model."""

import itertools
import json

import pytest
from matplotlib import image

from dflash import errors
from experiments.chip import __main__ as chip
from experiments.chip import page

TINY = (
    *("--models", "configs/random_tiny_dflash.yml", "--weights", "float32", "float13"),
    *("--strategies", "plain", "tree", "--rows", "8", "--batches", "2", "--contexts", "64"),
    *("--temperatures", "0", "--turns", "2", "--repeats", "1", "--prompts", "2"),
    *("--new_tokens", "12", "--minutes", "60", "target.architecture.num_hidden_layers=1"),
    *("target.architecture.vocab_size=512", "drafter.architecture.num_hidden_layers=1"),
    "drafter.architecture.num_target_features=1",
)


def parse(*arguments):
    return chip._parser().parse_intermixed_args(["--workdir", "w", *arguments])


def call(directory, *arguments):
    chip.main(["--workdir", str(directory), *TINY, *arguments])
    return json.loads((directory / "chip.json").read_text())


def test_a_call_writes_every_figure_and_a_later_one_skips_what_is_ready(tmp_path, capsys):
    store = call(tmp_path)
    (first,) = store["calls"]
    assert first["left_out"] == []
    assert first["command"].startswith("python -m experiments.chip --workdir ")
    failed = [one for one in store["settings"].values() if "error" in one]
    assert len(failed) == 6
    assert {one["weights"] for one in failed} == {"float13"}
    measured = {
        (one["part"], one["strategy"]): one
        for one in store["settings"].values()
        if "error" not in one
    }
    timed = {("cycles", "plain"): 1, ("cycles", "tree"): 33, ("rows", "8"): 8}
    outputs = {("equality", name) for name in ("tree", "oracle", "exact oracle")}
    assert measured.keys() == timed.keys() | outputs
    for key, rows in timed.items():
        one = measured[key]
        assert one["rows"] == rows
        assert one["ms"].keys() == {"cycle", *page.PARTS}
        assert one["ms"]["cycle"] > 0
        floors, drafts = one["floor_ms"], key == ("cycles", "tree")
        assert min(floors["forward"], floors["unembed"]) > 0
        assert (floors["draft"] > 0) == drafts
        assert floors["cycle"] >= floors["draft"] + floors["forward"]
        programs = {"cycle", "empty", "forward", "unembed", "judge"}
        assert one["compile"].keys() == programs | ({"draft_alone", "commit"} if drafts else set())
    for key in outputs:
        assert measured[key]["identical"] == measured[key]["of"] == 2
        assert measured[key]["differences"] == []
    for name in ("oracle", "exact oracle"):
        assert measured["equality", name]["acceptance_length"] > 2
    text = (tmp_path / "chip.md").read_text()
    assert "6 settings measured, 6 failed, 0 left out." in text
    assert text.count("| random_tiny_dflash | float32 | 2 | 64 | 0.0 |") == 6
    for name in ("cycles", "rows"):
        assert f"]({name}.png)" in text
        assert min(image.imread(tmp_path / f"{name}.png").shape[:2]) > 100

    capsys.readouterr()
    again = call(tmp_path)
    assert " · " not in capsys.readouterr().err
    assert again["settings"] == store["settings"]
    assert len(again["calls"]) == 2
    with pytest.raises(errors.InputError, match="figures with turns 2, and this call has 3"):
        call(tmp_path, "--turns", "3")


def test_settings_begin_with_the_first_value_of_every_list():
    wanted = chip.settings(parse())
    first, default = wanted[0], wanted[:15]
    assert (first.part, first.strategy, first.batch, first.context) == ("cycles", "plain", 1, 512)
    assert {(one.model, one.weights, one.batch, one.context) for one in default} == {
        ("configs/qwen3_4b_dflash.yml", "bfloat16", 1, 512)
    }
    assert len(set(wanted)) == len(wanted) == 144 + 96 + 264
    only = chip.settings(parse("--parts", "rows", "--rows", "4", "2"))
    assert [one.strategy for one in only[:2]] == ["4", "2"]


@pytest.mark.parametrize(("seconds", "count"), [(19.5, 0), (20.5, 1), (1e6, 3)])
def test_a_setting_that_would_not_fit_is_left_out(seconds, count, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(chip.time, "monotonic", lambda: next(clock) / 1e3)
    todo = chip.settings(parse())[:3]
    known = [{"seconds": 50.0}, *({"seconds": size} for size in (1.0, 20.0, 2.0))]
    ready = chip.run(todo, lambda setting: {"seconds": 30.0}, seconds, known)
    assert [setting for setting, _ in ready] == todo[:count]
