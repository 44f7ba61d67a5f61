"""Tests of the plan of a distillation: its questions, and the shipped configs."""

import pytest
from support import write_lines

from dflash.config import distill_schema, loader, merging
from dflash.config.schema import PromptsConfig
from dflash.distillation import distill_plan, stages
from dflash.loading import job as decode_jobs

SMALL = (
    "target.checkpoint=assets/tiny_target", "drafter.name=dflash", "drafter.checkpoint=random",
    "drafter.architecture.num_hidden_layers=1", "train.steps=1",
)  # fmt: skip


def described(*overrides, base=None) -> list[str]:
    """Returns the lines about the questions of a distillation of the embedded target."""
    config = loader.load(base, (*SMALL, *overrides), distill_schema.DistillRun)
    job = decode_jobs.prepare_models(config.answer_run(PromptsConfig()), dry=True)
    return list(distill_plan.describe_questions(config, job))


def test_the_plan_tells_how_questions_are_asked(tmp_path):
    """References are dropped, texts go through the template, and one prompt is shown."""
    file = tmp_path / "questions.jsonl"
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "No!"}]
    write_lines(file, [{"messages": turns}] * 3)
    lines = described(f"answers.files=[{file}]")
    assert f"  {file}: 3 lines" in lines
    assert "    3 end with a reference answer, which is dropped" in lines
    shown = [line for line in lines if line.startswith("    | ")]
    assert any("Hi?" in line for line in shown)
    assert not any("No!" in line for line in shown)
    write_lines(file, [{"prompt": "Hi?"}])
    lines = described(f"answers.files=[{file}]")
    assert [line for line in lines if line.startswith("    | ")] == shown
    assert "  texts go through the chat template (answers.chat=false turns it off)" in lines
    lines = described(f"answers.files=[{file}]", "answers.chat=false")
    assert "    | Hi?" in lines
    plain = "  texts are decoded as they are, without the chat template (answers.chat=false)"
    assert plain in lines
    config = loader.load(None, (*SMALL, f"answers.files=[{file}]"), distill_schema.DistillRun)
    (run,) = config.answer_runs().values()
    assert run.prompts.chat is None


def test_naming_files_replaces_the_answers_of_the_config(tmp_path):
    file, base = tmp_path / "questions.jsonl", tmp_path / "config.yml"
    write_lines(file, [{"prompt": "Hi?"}])
    base.write_text("answers: {made: answers.jsonl}")
    assert f"  {file}: 1 line" in described(f"answers.files=[{file}]", base=base)


@pytest.mark.parametrize("path", sorted(merging.package_configs().glob("distill/*.yml")))
def test_shipped_configs_load_and_plan(path, tmp_path):
    path, file = f"configs/distill/{path.name}", tmp_path / "q.jsonl"
    write_lines(file, [{"prompt": "Hi?"}])
    overrides = [f"answers.files=[{file}]"]
    if path.endswith("/dflash2.yml"):
        overrides.append("target.checkpoint=assets/tiny_target")
    found = loader.load(path, overrides, schema=distill_schema.DistillRun)
    assert found.answer_runs()
    assert found.data.files == ()
    if found.target.checkpoint == "assets/tiny_target":  # Runs in a fresh clone.
        assert distill_plan.make(found, answers=stages.ANSWERS, dry=True)
    header = loader.find_config(path).read_text(encoding="utf-8")
    assert f"python -m dflash.distill {path}" in header
    assert "Needs:" in header
