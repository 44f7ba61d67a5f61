"""`python -m dflash.distill`: from a small random target to its drafter, killed here and there."""

import functools
import json
import pathlib

import numpy as np
import pytest
from safetensors import numpy as safetensors
from support import tiny_distillation

from dflash import distill, sweep
from dflash.checkpoints import checkpoint
from dflash.config import distill_schema, loader
from dflash.distillation import card, distill_sweep, recipe_comparison, stages
from dflash.inference.scheduler import Scheduler
from dflash.runs import outputs, records, sweeps
from dflash.training.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file, and questions beside it."""
    return tiny_distillation.write_config(tmp_path_factory.mktemp("distill"))


def run(*arguments) -> int:
    """Returns the exit status of the command."""
    with pytest.raises(SystemExit) as caught:
        distill.main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.fixture(scope="module")
def whole(config):
    """A distillation that nothing disturbed."""
    workdir = config.parent / "whole"
    assert run(config, "--workdir", workdir) == 0
    return workdir


def tree(directory: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Returns size and modification time of every file."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(x.relative_to(directory)): (x.stat().st_size, x.stat().st_mtime_ns) for x in found}


def test_everything_is_there_in_the_end(whole):
    answers = [json.loads(line) for line in (whole / stages.ANSWERS).read_text().splitlines()]
    assert [bytes(one["prompt_ids"]).decode() for one in answers] == [
        f"Question {number}?" for number in range(14)
    ]
    assert {len(one["output_ids"]) for one in answers} == {12}
    assert json.loads((whole / stages.TRAINED).read_text())["steps"] == 4
    measured = json.loads((whole / stages.TESTED).read_text())["math"]
    assert measured["baseline"]["identical"] == measured["baseline"]["prompts"] == 2
    assert checkpoint.read_config(whole / "drafter")["architectures"] == ["DFlashDraftModel"]
    card = (whole / "drafter" / "README.md").read_text()
    assert f"| math | {measured['tau']:.2f} |" in card
    assert "14 answers of the target itself, 168 tokens" in card
    assert "4 steps of 2 × 64 tokens" in card
    assert "states no licence" in card
    assert "drafter.name=dflash drafter.checkpoint=. drafter.block_size=auto" in card


def test_a_race_of_recipes_is_a_sweep_on_the_same_answers(config, whole, capsys):
    """Figures of every recipe in a row, trees too; a second start has nothing left to do."""
    workdir = config.parent / "race"
    command = [str(config), f"answers.made={whole / stages.ANSWERS}", "test.trees=[5]"]
    command += ["test.block_sizes=[2]"]
    command += ["sweep.run=distill", "sweep.product.train.seed=[0]", "train.log_every=1"]
    for _ in range(2):
        with pytest.raises(SystemExit) as caught:
            sweep.main([*command, "--workdir", str(workdir)])
        assert caught.value.code == 0, capsys.readouterr().err
    assert "1 of 1 points are already finished" in capsys.readouterr().err
    (point,) = (workdir / "points").iterdir()
    assert not (point / "answers").exists()
    assert (point / stages.ANSWERS).read_bytes() == (whole / stages.ANSWERS).read_bytes()
    tested = json.loads((point / stages.TESTED).read_text())
    assert tested["math"]["tau"] == json.loads((whole / stages.TESTED).read_text())["math"]["tau"]
    assert tested["math-tree5"]["baseline"]["identical"] == 2
    assert list(tested["math-block2"]["acceptance_histogram"]) == ["1", "2"]
    card = (point / "drafter" / "README.md").read_text()
    assert "168 tokens, from an earlier distillation." in card
    assert "| math-tree5 |" in card
    (row,) = sweeps.read_rows(workdir / "sweep.csv")
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


def test_a_second_start_does_nothing(config, whole, capsys):
    before = tree(whole)
    assert run(config, "--workdir", whole) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:-1] == [f"{stage.name}: already done" for stage in stages.STAGES]
    changed = {name for name, figures in tree(whole).items() if before.get(name) != figures}
    assert changed <= {"config.yml", "date.txt"}


def test_killed_anywhere_it_ends_the_same(config, whole):
    """Inside answers, inside training, after a stage: every kill costs only what was in flight."""
    workdir = config.parent / "killed"
    command = [str(config), "test.tasks=[]", "--workdir", str(workdir)]
    kill = functools.partial(tiny_distillation.kill_at, main=lambda: distill.main(command))

    kill(Scheduler, "step", 12)
    finished = (workdir / "answers/0-questions/outputs.jsonl").read_text().splitlines()
    assert 0 < len(finished) < 14
    kill(Checkpoints, "save", 2)  # the first one, of step 2, is whole
    assert (workdir / stages.ANSWERS).exists()
    assert not (workdir / stages.TRAINED).exists()
    kill(card, "write", 1)
    assert (workdir / stages.TESTED).exists()
    assert not (workdir / stages.DRAFTER).exists()
    assert run(config, "test.tasks=[]", "--workdir", workdir) == 0
    assert "Not measured." in (workdir / "drafter/README.md").read_text()
    assert (workdir / stages.ANSWERS).read_bytes() == (whole / stages.ANSWERS).read_bytes()
    weights = safetensors.load_file(whole / "drafter/model.safetensors")
    for name, array in safetensors.load_file(workdir / "drafter/model.safetensors").items():
        np.testing.assert_array_equal(array, weights[name])


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        ("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n", "apache-2.0"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("# No front matter\n", None),
        (None, None),
    ],
)
def test_the_card_names_the_licence_of_the_target(readme, licence, tmp_path):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    overrides = [f"target.checkpoint={tmp_path}", "answers.files=[q.jsonl]"]
    path = "configs/distill/dflash2.yml"
    config = loader.load(path, overrides, distill_schema.DistillRun)
    text = card.write(config, card.DistillationFigures(3, 30, 5, None, {}))
    assert card.target_licence(str(tmp_path)) == licence
    assert (f"\nlicense: {licence}\n" in text) == (licence is not None)
    assert ("states no licence" in text) == (licence is None)
    assert "Not measured." in text


def test_another_config_is_refused(config, whole, capsys):
    assert run(config, "train.steps=5", "--workdir", whole) == 1
    assert "train.steps: 4 there, 5 here" in capsys.readouterr().err


def test_a_dry_run_plans_time_and_disk(tmp_path, capsys):
    """Uses fewer layers of the 4B target, so that tracing is quick."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "Why?"}\n' * 30_000)
    fewer = "target.architecture.num_hidden_layers=4", "drafter.architecture.num_hidden_layers=1"
    taps = "drafter.architecture.target_layer_ids=[0, 1]"
    path = "configs/distill/qwen3_4b_dflash.yml"
    asked = f"answers.files={questions}"
    assert run(path, asked, *fewer, taps, "mesh.fsdp=8", "plan.chip=v5p", "--dry_run") == 0
    out = capsys.readouterr().out
    assert "parameters   target 792,681,984, drafter 0" in out
    assert "frozen target 792,681,984" in out
    assert "at the peaks of 8 × v5p" in out
    rows = {
        line.split()[0]: line.split() for line in out.partition("at least")[2].splitlines()[1:6]
    }
    assert list(rows) == ["answers", "training", "test", "export", "all"]
    # 61 M tokens of answers in steps of 256: each reads the weights and 1,280 tokens of the cache.
    kv_bytes = 4 * 2 * 8 * 128 * 2 * 256 * (256 + 1024)
    step_s = (792_681_984 * 2 + kv_bytes) / (8 * 2765e9)
    assert rows["answers"][1:3] == [f"{30_000 * 2048 / 256 * step_s / 60:.0f}", "min"]
    assert rows["answers"][3:5] == ["1.4", "GB"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "answers.files=[]",
            "answers.files: required: JSONL files of questions; or set answers.made",
        ),
        ("test.tasks=[cod]", "test.tasks: unknown data set 'cod'; did you mean 'code'?"),
        ("data.mixture={math: 1}", "data.mixture: has no share for jsonl, the answers"),
        ("answers.decode.page_size=9", "answers.decode.page_size: expected a power of two, got 9"),
        ("test.decode.max_length=4", "test.decode.max_length: 4 leaves no room for a prompt"),
        ("train.steps=null", "train.steps: give exactly one of train.steps and train.epochs"),
        ("plan.chip=v55", "unknown chip 'v55'"),
        ("test.trees=[0]", "test.trees[0]: expected an integer in [1, 1024], got 0"),
        (
            ["test.trees=[4]", "drafter={name: autoregressive, checkpoint: random}"],
            "'autoregressive' does not draft trees",
        ),
        ("test.block_sizes=[5]", "drafter.block_size: 5 is larger than the block size 4"),
        (["test.block_sizes=[5]", "drafter={name: eagle3, checkpoint: random}"], "no block size"),
        ("answers.made=none.jsonl", "none.jsonl: cannot be read: No such file or directory"),
        ("drafter.name=ngram", "drafter.name: 'ngram' has no weights to train"),
    ],
)
def test_problems_are_one_line_each(config, override, problem, capsys):
    overrides = [override] if isinstance(override, str) else override
    status = run(config, *overrides, "--dry_run")
    err = capsys.readouterr().err
    assert status == 2
    assert problem in err


def test_no_workdir_is_one_line(config, capsys):
    assert run(config) == 2
    assert "--workdir: required" in capsys.readouterr().err
