"""Files of kept features: what another target or other settings must not share."""

import os
import shutil

import pytest

from dflash import assets
from dflash.config import loader, train_schema
from dflash.training import kept_features, train_job


@pytest.fixture
def identity(tmp_path):
    """The hash of what features depend on, of a copy of the embedded target, by overrides."""
    shutil.copytree(assets.__path__[0] + "/tiny_target", tmp_path / "target")
    heads = "drafter={name: dflash2, checkpoint: random, architecture: {num_hidden_layers: 1}}"

    def find(*overrides) -> str:
        always = f"target.checkpoint={tmp_path / 'target'}", heads, "data.files=[a.jsonl]"
        config = loader.load(None, [*always, "train.steps=1", *overrides], train_schema.TrainRun)
        return kept_features._identity(train_job.prepare(config, dry=True).task)

    return find


def test_features_are_shared_by_runs_that_would_compute_the_same(identity):
    others = "train.steps=9", "train.seed=3", "optimizer.name=muon", "loss.num_anchors=8"
    assert identity(*others) == identity()


@pytest.mark.parametrize(
    "override",
    [
        "train.dtype=float32",
        "loss.name=kl",  # also reads the hidden states
        "drafter.architecture.target_layer_ids=[1, 3]",
        "target.rope_scaling={factor: 2.0, rope_type: linear}",
    ],
)
def test_other_settings_have_other_files(identity, override):
    assert identity(override) != identity()


def test_weights_that_are_written_again_have_other_files(identity, tmp_path):
    """Such as those of a target that was trained on, at the same path and of the same size."""
    before = identity()
    os.utime(tmp_path / "target" / "model.safetensors", ns=(1, 1))
    assert identity() != before
