"""The work directory: one run at a time, and only runs that learn the same."""

import dataclasses
import os
import subprocess
import sys

import pytest

from dflash import errors
from dflash.config import loader, train_schema
from dflash.runs import directories
from dflash.training import rundir
from dflash.training.rundir import RunDirectory

BASE = loader.load("configs/train/tiny_target.yml", schema=train_schema.TrainRun)


def change(group: str, **values):
    return dataclasses.replace(BASE, **{group: dataclasses.replace(getattr(BASE, group), **values)})


@pytest.fixture
def used(tmp_path):
    """A directory in which something was learned."""
    RunDirectory(tmp_path, BASE).close()
    (tmp_path / "checkpoints" / "100").mkdir(parents=True)
    return tmp_path


FREE = {
    "log_every": ("train", {"log_every": 99}),
    "checkpoint_every": ("train", {"checkpoint_every": 99}),
    "keep_last": ("train", {"keep_last": 9}),
    "remat": ("train", {"remat": True}),
    "export_dtype": ("train", {"export_dtype": "float32"}),
    "evaluation": ("evaluation", {"every": 7, "batches": 0}),
    "mesh": ("mesh", {"data": 2}),
}
FIXED = {
    "train.steps": ("train", {"steps": 99}),
    "train.batch_size": ("train", {"batch_size": 99}),
    "train.seed": ("train", {"seed": 9}),
    "train.dtype": ("train", {"dtype": "bfloat16"}),
    "optimizer.learning_rate": ("optimizer", {"learning_rate": 0.5}),
    "data.length": ("data", {"length": 99}),
    "loss.name": ("loss", {"name": "kl"}),
}


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_matter_may_change(used, name):
    group, values = FREE[name]
    changed = change(group, **values)
    assert changed != BASE
    with RunDirectory(used, changed):
        pass
    assert rundir.identity(changed) == rundir.identity(BASE)
    assert (used / "config.yml").read_text() == loader.to_yaml(changed)


@pytest.mark.parametrize("key", FIXED)
def test_what_matters_must_not_change(used, key):
    group, values = FIXED[key]
    changed = change(group, **values)
    before = (used / "config.yml").read_text()
    with pytest.raises(errors.WorkdirError, match=f"of another config \\({key}: ") as caught:
        RunDirectory(used, changed)
    assert "use another --workdir" in str(caught.value)
    assert rundir.identity(changed) != rundir.identity(BASE)
    assert (used / "config.yml").read_text() == before
    RunDirectory(used, BASE).close()  # the refused one holds no lock


def test_before_anything_was_learned_everything_may_change(tmp_path):
    RunDirectory(tmp_path, BASE).close()
    RunDirectory(tmp_path, change("train", steps=99)).close()


def test_many_differences_are_counted_not_listed(used):
    values = {"steps": 1, "batch_size": 2, "seed": 3, "dtype": "bfloat16", "epochs": 2.0}
    changed = dataclasses.replace(change("train", **values), task="drafter")
    with pytest.raises(errors.WorkdirError, match="; 1 more"):
        RunDirectory(used, changed)


def test_checkpoints_without_their_config_are_nobodys(used):
    (used / "config.yml").unlink()
    with pytest.raises(errors.WorkdirError, match=r"config\.yml: missing, so nobody"):
        RunDirectory(used, BASE)


def test_two_runs_do_not_share_a_directory(tmp_path):
    code = (
        "import sys; from dflash.config import loader, train_schema\n"
        "from dflash.training.rundir import RunDirectory\n"
        "config = loader.load('configs/train/tiny_target.yml', schema=train_schema.TrainRun)\n"
        "held = RunDirectory(sys.argv[1], config); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(errors.WorkdirError, match="in use by another run"):
            RunDirectory(tmp_path, BASE)
        holder.stdin.close()
    RunDirectory(tmp_path, BASE).close()


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.WorkdirError, match="cannot be written: not a directory"):
        RunDirectory(tmp_path / "file", BASE)


def test_a_file_is_written_whole(tmp_path):
    path = tmp_path / "x"
    directories.write_whole(path, "one")
    directories.write_whole(path, "two")
    assert (path.read_text(), os.listdir(tmp_path)) == ("two", ["x"])
