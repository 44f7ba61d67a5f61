"""The shipped training recipes, reduced in size: from decode's own output to a first evaluation."""

import math
import pathlib

import pytest
from support import exit_status, read_lines, write_lines
from support.reduced_recipes import REDUCED, TARGET, TRAINING

from dflash import decode, train

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "train").glob("*.yml"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> pathlib.Path:
    """outputs.jsonl of a decode run over 24 questions, made as the docs say."""
    directory = tmp_path_factory.mktemp("answers")
    questions = ({"prompt": f"Count from {n} to {n + 9}."} for n in range(24))
    file = write_lines(directory / "questions.jsonl", questions)
    arguments = (
        "configs/qwen3_4b_dflash.yml", *TARGET, "drafter.name=none", "prompts.text=[]",
        f"prompts.file={file}", "decode.batch_size=8",
        "decode.max_new_tokens=8", "dtype=float32", "--nostream",
    )  # fmt: skip
    assert exit_status(decode.main, *arguments, "--workdir", directory / "run") == 0
    return directory / "run" / "outputs.jsonl"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_on_what_decode_wrote(answers, tmp_path, recipe):
    arguments = (
        f"configs/train/{recipe}.yml",
        *TARGET,
        *TRAINING,
        *REDUCED[recipe],
        f"data.files={answers}",
        f"data.data_dir={answers.parent / 'data'}",
    )
    assert exit_status(train.main, *arguments, "--workdir", tmp_path) == 0
    lines = read_lines(tmp_path / "metrics.jsonl")
    (found,) = [line for line in lines if line["kind"] == "evaluation"]
    assert math.isfinite(found["loss"])
    assert found["tau"] >= 1
    assert "tau/jsonl" in found
    assert (tmp_path / "hf" / "model.safetensors").exists()
