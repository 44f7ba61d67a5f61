"""Recipes beside each other: sweeps of distillations, and their table and plot."""

import csv
import json
import pathlib

import numpy as np
import pytest
from support import tiny_distillation

from dflash import distill, sweep
from dflash.config import registry
from dflash.distillation import stages
from dflash.runs import outputs, records
from experiments.tiny_family import __main__ as command
from experiments.tiny_family import distill_sweep, recipe_comparison


def run(main, *arguments) -> int:
    """Returns the exit status of a command."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def test_a_comparison_of_recipes_is_a_sweep_on_the_same_answers(tmp_path, capsys):
    """Figures of every recipe in a row, trees too; a second start has nothing left to do."""
    assert registry.RUNS["distill"].implementation.endswith("DistillPoints"), command
    config, first = tiny_distillation.write_config(tmp_path), tmp_path / "first"
    assert run(distill.main, config, "test.tasks=[]", "--workdir", first) == 0
    workdir, made = tmp_path / "sweep", f"answers.made={first / stages.ANSWERS}"
    options = "sweep.run=distill", "sweep.product.train.seed=[0]", "train.log_every=1"
    for _ in range(2):
        variants = "test.trees=[5]", "test.block_sizes=[2]"
        status = run(sweep.main, config, made, *variants, *options, "--workdir", workdir)
        assert status == 0, capsys.readouterr().err
    assert "1 of 1 points are already finished" in capsys.readouterr().err
    (point,) = (workdir / "points").iterdir()
    tested = json.loads((point / stages.TESTED).read_text())
    (row,) = csv.DictReader((workdir / "sweep.csv").read_text().splitlines())
    assert float(row["math.tau"]) == tested["math"]["tau"]
    assert float(row["math-tree5.speed_up"]) == tested["math-tree5"]["baseline"]["speed_up"]
    cycle_s = tested["math"]["tau"] / tested["math"]["tokens_per_second"]
    assert float(row["math.cycle_ms"]) == pytest.approx(1e3 * cycle_s)
    assert float(row["training.hours"]) > 0
    assert row["training.steps"] == "4"
    assert (workdir / distill_sweep.PLOT).read_bytes().startswith(b"\x89PNG")
    recipes = (workdir / distill_sweep.TABLE).read_text(encoding="utf-8")
    assert f"| all | tree5 | {tested['math-tree5']['tau']:.2f} |" in recipes


def test_the_plot_of_a_race_has_the_points_whose_time_is_known():
    first = recipe_comparison.Recipe("kl", [(0.5, 3.0), (0.7, 3.1)], {})
    assert len(recipe_comparison.plot([first])) > 10_000
    assert recipe_comparison.plot(
        [first, recipe_comparison.Recipe("dpace", [(None, 2.0)], {})]
    ) == recipe_comparison.plot([first])


def write_test(points: pathlib.Path, name: str, cell: str, lengths) -> None:
    """Writes the outputs of a test, with the acceptance lengths of each prompt."""
    path = points / name / stages.TESTS / cell / records.OUTPUTS
    path.parent.mkdir(parents=True)
    done = [
        outputs.Record(
            index=index,
            prompt=None,
            prompt_ids=(1,),
            output_ids=(1,) * (1 + sum(some)),
            text="",
            finish_reason="length",
            acceptance_lengths=tuple(some),
            prefill_ms=1.0,
            decode_ms=1.0,
            decode_clock_s=1.0,
            block_sizes=(16,) * len(some),
        )
        for index, some in enumerate(lengths)
    ]
    path.write_bytes(b"".join(map(outputs.encode, reversed(done))))


def test_a_race_tells_a_difference_from_noise(tmp_path):
    """One recipe is better on every prompt, another on half of them; a third left no outputs."""
    random = np.random.default_rng(0)
    base = [[int(x) for x in random.integers(1, 8, 20)] for _ in range(12)]
    better = [[x + 1 for x in some] for some in base]
    mixed = [[x + (1 if n % 2 else -1) * (x > 1) for x in some] for n, some in enumerate(base)]
    taken = {"kl": base, "dpace": better, "other": mixed, "gone": None}
    rows = {}
    for name, lengths in taken.items():
        for seed in (0, 1):
            for cell in ("math", "math-tree5") if lengths else ():
                write_test(tmp_path, f"{name}{seed}", cell, lengths)
            tau = float(np.mean(lengths)) if lengths else 2.0
            figures = {f"{cell}.tau": tau for cell in ("math", "math-tree5")}
            rows[f"{name}{seed}"] = {"loss.name": name, "train.seed": seed, **figures}
    found = recipe_comparison.measured_recipes([["loss.name", "train.seed"]], rows, tmp_path)
    assert [one.name for one in found] == list(taken)
    assert [len(one.points) for one in found] == [2, 2, 2, 2]
    first, second, third, gone = (one.variants["tree5"] for one in found)
    assert (first.ratio, first.interval) == (1, None)
    assert second.ratio == pytest.approx(np.mean(better) / np.mean(base))
    assert 1 < second.interval[0] < second.ratio < second.interval[1]
    assert third.interval[0] < 1 < third.interval[1]
    assert (gone.ratio, gone.tau) == (None, 2.0)
    head, *lines = recipe_comparison.table(found).splitlines()
    assert "Against kl" in head
    cells = [line.removeprefix("| ").split(" | ") for line in lines[3:]]
    assert cells[0][0] == "dpace", "the largest τ comes first"
    verdicts = {"kl": "", "dpace": "significant", "other": "noise", "gone": ""}
    assert {one[0]: one[6] for one in cells if one[1] == "chain"} == verdicts


def test_points_of_a_recipe_may_have_been_tested_differently(tmp_path):
    """Recipes tested on different prompts, or on no common ones, get what can be computed."""
    write_test(tmp_path, "a", "math", [[2]] * 8)
    write_test(tmp_path, "a", "code", [[4]] * 6)
    write_test(tmp_path, "b", "math", [[4]] * 8)
    write_test(tmp_path, "b", "code", [[8]] * 6)
    write_test(tmp_path, "c", "math", [[2]] * 7)
    write_test(tmp_path, "c", "code", [[4]] * 6)
    rows = {
        "a": {"loss.name": "kl", "train.seed": 0, "math.tau": 2.0, "code.tau": 4.0},
        "b": {"loss.name": "dpace", "train.seed": 0, "code.tau": 8.0, "math.tau": 4.0},
    }
    first, second = recipe_comparison.measured_recipes(
        [["loss.name", "train.seed"]], rows, tmp_path
    )
    assert (second.variants[""].ratio, second.variants[""].interval) == (2.0, (2.0, 2.0))
    rows["c"] = rows["a"] | {"train.seed": 1}
    rows["d"] = {"loss.name": "dpace", "train.seed": 1, "chat.tau": 3.0}
    rows["e"] = {"loss.name": "other", "train.seed": 0, "math.tau": None}
    (only,) = recipe_comparison.measured_recipes(
        [["loss.name", "train.seed"]], {"c": rows["c"], **rows}, tmp_path
    )
    assert only.name == first.name
    assert only.variants[""].ratio is None


def test_few_prompts_give_no_interval():
    """A group of prompts that is too small says nothing of others; the ratio is known anyway."""
    some = np.array([[[4.0, 6.0]], [[2.0, 2.0]]])
    assert recipe_comparison.compare([2 * some], [some]) == (1.0, None)


def test_recipes_are_named_by_what_tells_them_apart():
    keys = ("drafter", "loss.name", "test.trees", "train.seed")
    rows = [
        {"drafter": {"name": "dflash", "layers": 2}, "loss.name": "kl"},
        {"drafter": {"name": "dflash", "layers": 2, "causal_head": True}, "loss.name": "kl"},
        {"drafter": {"name": "dflash", "layers": 2}, "loss.name": "dpace"},
        {"drafter": {"name": "medusa", "heads": 15}, "loss.name": "kl"},
    ]
    rows = [row | {"test.trees": [n], "train.seed": n} for n, row in enumerate(rows)]
    assert recipe_comparison.recipe_names(keys, [*rows, rows[0] | {"train.seed": 9}]) == [
        "dflash, kl", "dflash, kl, causal_head", "dflash, dpace", "medusa, kl", "dflash, kl",
    ]  # fmt: skip
