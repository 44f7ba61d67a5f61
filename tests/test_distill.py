"""`python -m dflash.distill`: from a small random target to its drafter, killed here and there."""

import functools
import json
import pathlib

import numpy as np
import pytest
from safetensors import numpy as safetensors
from support import exit_status, read_lines, tiny_distillation, write_lines

from dflash import distill
from dflash.checkpoints import checkpoint
from dflash.config import distill_schema, loader
from dflash.distillation import card, stages
from dflash.inference.scheduler import Scheduler
from dflash.training.checkpoints import Checkpoints

run = functools.partial(exit_status, distill.main)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file, and questions beside it."""
    return tiny_distillation.write_config(tmp_path_factory.mktemp("distill"))


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
    answers = read_lines(whole / stages.ANSWERS)
    asked = [bytes(one["prompt_ids"]).decode() for one in answers]
    assert asked == [f"Question {number}?" for number in range(14)]
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


def test_answers_of_an_earlier_distillation_are_reused(config, whole):
    """The drafter is tested with further block sizes and trees too."""
    workdir = config.parent / "made"
    made = f"answers.made={whole / stages.ANSWERS}"
    assert run(config, made, "test.trees=[5]", "test.block_sizes=[2]", "--workdir", workdir) == 0
    assert not (workdir / "answers").exists()
    assert (workdir / stages.ANSWERS).read_bytes() == (whole / stages.ANSWERS).read_bytes()
    tested = json.loads((workdir / stages.TESTED).read_text())
    assert tested["math"]["tau"] == json.loads((whole / stages.TESTED).read_text())["math"]["tau"]
    assert tested["math-tree5"]["baseline"]["identical"] == 2
    assert list(tested["math-block2"]["acceptance_histogram"]) == ["1", "2"]
    card = (workdir / "drafter" / "README.md").read_text()
    assert "168 tokens, from an earlier distillation." in card
    assert "| math-tree5 |" in card


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
    text = card.write(config, [10] * 3, {"steps": 5, "best": None}, {})
    assert card.target_licence(str(tmp_path)) == licence
    assert (f"\nlicense: {licence}\n" in text) == (licence is not None)
    assert ("states no licence" in text) == (licence is None)
    assert "Not measured." in text


def test_another_config_is_refused(config, whole, capsys):
    assert run(config, "train.steps=5", "--workdir", whole) == 1
    assert "train.steps: 4 there, 5 here" in capsys.readouterr().err


def test_a_dry_run_plans_time_and_disk(tmp_path, capsys):
    """Uses fewer layers of the 4B target, so that tracing is quick."""
    questions = write_lines(tmp_path / "questions.jsonl", [{"prompt": "Why?"}] * 30_000)
    fewer = "target.architecture.num_hidden_layers=4", "drafter.architecture.num_hidden_layers=1"
    taps = "drafter.architecture.target_layer_ids=[0, 1]"
    path = "configs/distill/qwen3_4b_dflash.yml"
    asked = f"answers.files={questions}"
    assert run(path, asked, *fewer, taps, "mesh.fsdp=8", "plan.chip=v5p", "--dry_run") == 0
    out = capsys.readouterr().out
    assert "parameters   target 792,681,984, drafter 0" in out
    assert "frozen target 792,681,984" in out
    assert "at the peaks of 8 × v5p" in out
    lines = map(str.split, out.partition("at least")[2].splitlines()[1:6])
    rows = {line[0]: line for line in lines}
    assert list(rows) == ["answers", "training", "test", "export", "all"]
    # 61 M tokens of answers in steps of 256: each reads the weights and 1,280 tokens of the cache.
    kv_bytes = 4 * 2 * 8 * 128 * 2 * 256 * (256 + 1024)
    step_s = (792_681_984 * 2 + kv_bytes) / (8 * 2765e9)
    assert rows["answers"][1:3] == [f"{30_000 * 2048 / 256 * step_s / 60:.0f}", "min"]
    assert rows["answers"][3:5] == ["1.4", "GB"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("answers.files=[]",
         "answers.files: required: JSONL files of questions; or set answers.made"),
        ("test.tasks=[cod]", "test.tasks: unknown data set 'cod'; did you mean 'code'?"),
        ("data.mixture={math: 1}", "data.mixture: has no share for jsonl, the answers"),
        ("answers.decode.page_size=9", "answers.decode.page_size: expected a power of two, got 9"),
        ("test.decode.max_length=4", "test.decode.max_length: 4 leaves no room for a prompt"),
        ("train.steps=null", "train.steps: give exactly one of train.steps and train.epochs"),
        ("plan.chip=v55", "unknown chip 'v55'"),
        ("test.trees=[0]", "test.trees[0]: expected an integer in [1, 1024], got 0"),
        (["test.trees=[4]", "drafter={name: autoregressive, checkpoint: random}"],
         "'autoregressive' does not draft trees"),
        ("test.block_sizes=[5]", "drafter.block_size: 5 is larger than the block size 4"),
        (["test.block_sizes=[5]", "drafter={name: eagle3, checkpoint: random}"], "no block size"),
        ("answers.made=none.jsonl", "none.jsonl: cannot be read: No such file or directory"),
        ("drafter.name=ngram", "drafter.name: 'ngram' has no weights to train"),
    ],
)  # fmt: skip
def test_problems_are_one_line_each(config, override, problem, capsys):
    overrides = [override] if isinstance(override, str) else override
    status = run(config, *overrides, "--dry_run")
    err = capsys.readouterr().err
    assert status == 2
    assert problem in err
