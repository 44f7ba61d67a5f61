"""The work directory: one run at a time, and only runs that learn the same."""

import dataclasses
import datetime

import pytest

from dflash import errors
from dflash.config import loader, train_schema
from dflash.training import rundir

DATE = datetime.date(2026, 1, 31)
RUN = "task=target", "target.checkpoint=a", "train.steps=10", "train.dtype=float32"
BASE = loader.load(None, (*RUN, "data.files=[a.jsonl]"), train_schema.TrainRun)


def change(group: str, **values):
    return dataclasses.replace(BASE, **{group: dataclasses.replace(getattr(BASE, group), **values)})


@pytest.fixture
def used(tmp_path):
    """A directory in which something was learned."""
    rundir.open_directory(tmp_path, BASE, DATE).close()
    (tmp_path / "checkpoints" / "100").mkdir(parents=True)
    return tmp_path


FREE = {
    "log_every": ("train", {"log_every": 99}),
    "export_dtype": ("train", {"export_dtype": "float32"}),
    "evaluation": ("evaluation", {"every": 7, "batches": 0}),
    "mesh": ("mesh", {"data": 2}),
}
FIXED = {
    "train.steps": ("train", {"steps": 99}),
    "optimizer.learning_rate": ("optimizer", {"learning_rate": 0.5}),
    "data.length": ("data", {"length": 99}),
    "loss.name": ("loss", {"name": "kl"}),
}


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_matter_may_change(used, name):
    group, values = FREE[name]
    changed = change(group, **values)
    assert changed != BASE
    with rundir.open_directory(used, changed, DATE):
        pass
    assert rundir.identity(changed) == rundir.identity(BASE)
    assert (used / "config.yml").read_text() == loader.to_yaml(changed)


@pytest.mark.parametrize("key", FIXED)
def test_what_matters_must_not_change(used, key):
    group, values = FIXED[key]
    changed = change(group, **values)
    before = (used / "config.yml").read_text()
    with pytest.raises(errors.WorkdirError, match=f"of another config \\({key}: ") as caught:
        rundir.open_directory(used, changed, DATE)
    assert "use another --workdir" in str(caught.value)
    assert f"give {BASE.task}.checkpoint={used}/hf as well" in str(caught.value)
    assert rundir.identity(changed) != rundir.identity(BASE)
    assert (used / "config.yml").read_text() == before
    rundir.open_directory(used, BASE, DATE).close()  # the refused one holds no lock


def test_a_checkpoint_that_a_kill_left_unfinished_is_nothing_learned(tmp_path):
    rundir.open_directory(tmp_path, BASE, DATE).close()
    (tmp_path / "checkpoints" / "100.orbax-checkpoint-tmp").mkdir(parents=True)
    rundir.open_directory(tmp_path, change("train", steps=99), DATE).close()


def test_checkpoints_without_their_config_are_nobodys(used):
    (used / "config.yml").unlink()
    with pytest.raises(errors.WorkdirError, match=r"config\.yml: missing, so the config"):
        rundir.open_directory(used, BASE, DATE)


@dataclasses.dataclass(frozen=True)
class LaterTrain(train_schema.TrainConfig):
    """Training keys of a later version."""

    patience: int = 3


def test_a_key_that_a_later_version_adds_changes_no_identity():
    values = {
        field.name: getattr(BASE.train, field.name) for field in dataclasses.fields(BASE.train)
    }
    later = dataclasses.replace(BASE, train=LaterTrain(**values))
    assert rundir.identity(later) == rundir.identity(BASE)
    used = dataclasses.replace(BASE, train=LaterTrain(**values, patience=4))
    assert rundir.identity(used) != rundir.identity(BASE)


def test_a_free_key_frees_no_key_that_begins_like_it():
    free = ("train.remat", "evaluation", "evaluation.decode.top_k", "mesh.data")
    fixed = ("train.remat_policy", "train", "evaluations.every", "mesh_axes")
    assert [train_schema.is_free(key) for key in free] == [True] * len(free)
    assert [train_schema.is_free(key) for key in fixed] == [False] * len(fixed)
