"""`--dry_run`: what a plan counts is what a run then has."""

import functools

import jax
import pytest

from dflash.config import loader, train_schema
from dflash.training import state as states
from dflash.training import train_job
from dflash.training import train_plan as plans

SMALL = (
    "target.checkpoint=random",
    "target.name=qwen3",
    "target.architecture={vocab_size: 320, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, "
    "max_position_embeddings: 512}",
    "drafter={name: dflash, checkpoint: random, architecture: {num_hidden_layers: 1, "
    "target_layer_ids: [0, 1], num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}}",
    "data.files=[answers.jsonl]",
    "train.dtype=float32",
    "train.batch_size=8",
    "data.length=64",
    "evaluation.prompts=0",
    "evaluation.batches=0",
)


@functools.cache
def make_plan(*overrides):
    config = loader.load("train/dflash2.yml", [*SMALL, *overrides], train_schema.TrainRun)
    job = train_job.prepare(config, dry=True)
    return job, job.plan()


def nbytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_weights_and_optimizer_are_counted_exactly():
    job, plan = make_plan("optimizer.name=adamw")
    optimizer, _ = job.optimizer(10)
    _, params = states.split(job.task.learner)
    state = states.abstract(params, optimizer, job.sharding)
    assert plan.memory_bytes["weights (float32)"] == nbytes(params)
    assert plan.memory_bytes["optimizer"] == nbytes(state.optimizer) > 2 * nbytes(params)
    assert plan.counts["learning"] * 4 == nbytes(params)


def test_a_mesh_divides_what_each_device_holds():
    _, one = make_plan()
    _, eight = make_plan("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    for kind, size in one.memory_bytes.items():
        assert size / 9 < eight.memory_bytes[kind] < size / 1.9, kind


@pytest.mark.parametrize(
    ("option", "share"),
    [("train.remat=true", 1), ("train.dtype=bfloat16", 1), ("optimizer.accumulate_steps=4", 0.5)],
)
def test_what_saves_memory_shows(option, share):
    before, after = (
        make_plan(*options)[1].memory_bytes["activations (estimate)"] for options in ((), (option,))
    )
    assert after < share * before


def test_programs_are_those_that_the_config_asks_for():
    assert make_plan()[1].programs == ("step",)
    asked = "evaluation.prompts=2", "evaluation.batches=1"
    names = make_plan(*asked)[1].programs
    assert names[:2] == ("step", "held-out loss")


def test_lines_are_for_people():
    lines = make_plan("train.steps=null", "train.epochs=2.5")[1].lines()
    assert "duration     2.5 epochs of rows of 64 tokens" in lines
    assert plans.readable(3 * 2**29) == "1.50 GiB"
