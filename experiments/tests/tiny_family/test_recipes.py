"""The recipes of the tiny family, reduced in size, and the shapes that they train."""

import json
import math
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from support.models import make_sharding
from support.reduced_recipes import BLOCK, DRAFTER, EAGLE3, TARGET, TRAINING

import experiments.tiny_family.__main__  # noqa: F401 - registers sweeps of distillations
from dflash import assets
from dflash.config import distill_schema, loader, registry, sweep_points, train_schema
from dflash.drafters.parts.weighted import WeightedDrafter
from dflash.models.dense import Qwen3
from dflash.parallel import parameters

FAMILY = pathlib.Path(__file__).parents[2] / "tiny_family"
ROOT = FAMILY.parents[1]
RECIPES = sorted(path.stem for path in FAMILY.glob("train/*.yml"))
BLOCK_DRAFTER = (*DRAFTER, *BLOCK, "drafter.architecture.num_target_features=1")
MIXTURE = "data.mixture={jsonl: 0.7, arithmetic: 0.3, copying: 0, math: 0, code: 0, chat: 0}"
REDUCED = {
    "eagle3": EAGLE3,
    "medusa": ("loss.num_anchors=4", "drafter.architecture.block_size=4"),
    "target": ("tokenizer=null",),
    "ubtree": (*BLOCK_DRAFTER, "drafter.initialize_from=fresh"),
}


def kind_of(name: str) -> type:
    return registry.load(registry.DRAFTERS[name].implementation)


def test_every_trained_strategy_has_a_recipe():
    trained = {name for name in registry.DRAFTERS if issubclass(kind_of(name), WeightedDrafter)}
    assert {*RECIPES} == {*trained, "target"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(tmp_path, recipe):
    answers = tmp_path / "answers.jsonl"
    lines = [{"prompt_ids": [7, n], "output_ids": [9] * 40 + [2]} for n in range(60)]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = f"data.files={answers}", f"data.data_dir={tmp_path}", MIXTURE
    reduced = REDUCED.get(recipe, BLOCK_DRAFTER)
    path = str(FAMILY / "train" / f"{recipe}.yml")
    run("train", path, *TARGET, *TRAINING, *reduced, *options, "--workdir", str(tmp_path / "run"))
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (found,) = [line for line in map(json.loads, metrics) if line["kind"] == "evaluation"]
    assert math.isfinite(found["loss"])
    assert recipe == "target" or found["tau"] >= 1
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


def run(*arguments: str) -> None:
    """Runs a command with the generated data sets."""
    command = [sys.executable, "-m", "experiments.tiny_family", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_the_recipe_of_an_embedded_drafter_makes_its_shape(name):
    run = loader.load(FAMILY / "train" / f"{name}.yml", schema=train_schema.TrainRun)
    embedded = pathlib.Path(assets.__path__[0])
    stored = json.loads((embedded / "tiny_target" / "config.json").read_text())
    kind, shape = kind_of(name), Qwen3.architecture_from_hf(stored)
    found = kind.architecture_for(shape, run.drafter.architecture).fit(shape)
    stored = json.loads((embedded / f"tiny_{name}" / "config.json").read_text())
    assert found == kind.architecture_from_hf(stored)
    fresh = kind(found, dtype=jnp.bfloat16, sharding=make_sharding())
    assert parameters.count(fresh) > 0


@pytest.mark.parametrize("path", sorted(FAMILY.glob("distill/*.yml")), ids=lambda path: path.stem)
def test_a_distillation_loads(path):
    assert loader.load(path, schema=distill_schema.DistillRun).answer_runs()


@pytest.mark.parametrize("path", sorted(FAMILY.glob("sweeps/*.yml")), ids=lambda path: path.stem)
def test_a_sweep_loads(path):
    assert len(sweep_points.load(path).points) in (4, 8, 20)
