"""Checkpoints: what was saved comes back, damage is noticed, failures leave the last good one."""

import errno
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import TESTS, run_python, toy

from dflash import errors
from dflash.training import checkpoints as checkpoints_lib
from dflash.training import state as states
from dflash.training.checkpoints import Checkpoints
from dflash.training.state import TrainState


def make_state(step: int, size: int = 20_000) -> TrainState:
    """Returns a state of noise, which does not compress."""
    rng = np.random.default_rng(step)
    weights = jnp.asarray(rng.normal(size=(4, size)).astype(jnp.float32))
    halves = jnp.asarray(rng.normal(size=7).astype(jnp.bfloat16))
    return TrainState(
        step=jnp.int32(step),
        key=jnp.zeros(2, jnp.uint32),
        params={"a": weights, "b": halves},
        optimizer=(jnp.int32(step), {"a": weights * 2}),
    )


def like(state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_equal(one: TrainState, other: TrainState) -> None:
    assert states.flatten(one).keys() == states.flatten(other).keys()
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def files_of(directory: pathlib.Path, step: int) -> list[pathlib.Path]:
    """Returns the files of a checkpoint, the largest first."""
    found = [p for p in (directory / "checkpoints" / str(step)).rglob("*") if p.is_file()]
    return sorted(found, key=lambda path: -path.stat().st_size)


@pytest.fixture
def two_saved(tmp_path):
    """Checkpoints of steps 1 and 2."""
    with Checkpoints(tmp_path / "checkpoints", keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {"data": {"next": step}}, best=None)
        checkpoints.wait()
    return tmp_path


def restore(directory, size: int = 20_000):
    notes = []
    with Checkpoints(directory / "checkpoints", keep_last=2) as checkpoints:
        return checkpoints.restore(like(make_state(0, size)), notes.append), notes


def saved(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a directory."""
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def test_the_newest_comes_back(two_saved):
    restored, notes = restore(two_saved)
    assert (restored.step, restored.metadata, notes) == (2, {"data": {"next": 2}}, [])
    assert_equal(restored.state, make_state(2))


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = make_state(5, size=500_000)
    with Checkpoints(tmp_path / "checkpoints", keep_last=2) as checkpoints:
        checkpoints.save(5, state, {}, best=None)
        for _ in range(3):
            state = advance(state)
        checkpoints.wait()
    restored, notes = restore(tmp_path, size=500_000)
    assert notes == []
    assert_equal(restored.state, make_state(5, size=500_000))


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, lambda file: file.write_bytes(file.read_bytes()[:1000]), pathlib.Path.unlink],
    ids=["flipped bit", "cut short", "missing"],
)
def test_a_damaged_newest_falls_back_to_the_one_before(two_saved, damage):
    damage(files_of(two_saved, 2)[0])
    restored, notes = restore(two_saved)
    assert restored.step == 1
    assert_equal(restored.state, make_state(1))
    (note,) = notes
    assert note.startswith("checkpoint of step 2 is damaged (")
    assert note.endswith("): going back to step 1")
    assert "\n" not in note
    assert (two_saved / "damaged" / "2").is_dir()
    assert restore(two_saved)[1] == []


def test_with_all_damaged_the_run_does_not_start_over_in_silence(two_saved):
    """Neither at this start nor at the next, until damaged/ is deleted."""
    for step in (1, 2):
        files_of(two_saved, step)[0].unlink()
    for _ in range(2):
        with pytest.raises(errors.WorkdirError, match="no good one is left") as caught:
            restore(two_saved)
        assert f"{two_saved / 'damaged'}: " in str(caught.value)
        assert "delete this directory to start again at step 0" in str(caught.value)
    assert saved(two_saved / "damaged") == [1, 2]
    shutil.rmtree(two_saved / "damaged")
    assert restore(two_saved) == (None, [])


FAILURES = {
    "device memory": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    "memory": MemoryError(),
    "file handles": OSError(errno.EMFILE, "Too many open files"),
    "network": ValueError("UNAVAILABLE: Error reading params.a: connection reset"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_that_is_no_damage_touches_nothing(two_saved, failure, monkeypatch):
    def fail(*unused):
        raise FAILURES[failure]

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_restore", fail)
        with pytest.raises(errors.WorkdirError, match="2: cannot be restored: ") as caught:
            restore(two_saved)
    assert "\n" not in str(caught.value)
    reason = FAILURES[failure].args[-1] if FAILURES[failure].args else "Memory"
    assert reason in str(caught.value)
    assert (saved(two_saved / "checkpoints"), (two_saved / "damaged").exists()) == ([1, 2], False)
    restored, notes = restore(two_saved)
    assert (restored.step, notes) == (2, [])


def test_every_file_of_a_checkpoint_is_checked(two_saved):
    """Whatever an error was, damage to any file that is read is found; and none where none is."""
    path = two_saved / "checkpoints" / "2"
    assert checkpoints_lib._find_damage(path) is None
    files = [path / name for name in json.loads((path / "files.json").read_text())]
    assert {file.relative_to(path).parts[0] for file in files} == {"state", "facts"}
    for file in files:
        name, content = str(file.relative_to(path)), file.read_bytes()
        file.write_bytes(content[:-1])
        assert checkpoints_lib._find_damage(path) == f"the checksum of {name} is wrong"
        file.unlink()
        assert checkpoints_lib._find_damage(path) == f"{name} is missing"
        file.write_bytes(content)
    (path / "files.json").write_text("{")
    assert checkpoints_lib._find_damage(path) == "files.json is not JSON"


def test_without_checksums_of_files_only_certain_damage_counts(two_saved):
    """Checkpoints of earlier versions have no files.json."""
    for step in (1, 2):
        (two_saved / "checkpoints" / str(step) / "files.json").unlink()
    path = two_saved / "checkpoints" / "2"
    assert checkpoints_lib._find_damage(path) is None
    (path / "facts" / "metadata").unlink()
    restored, (note,) = restore(two_saved)
    assert restored.step == 1
    assert "facts/metadata" in note


def test_the_last_and_the_best_are_kept(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep_last=2) as checkpoints:
        for step, best in enumerate([1, 2, 2, 2, 2, 2], start=1):
            checkpoints.save(step, make_state(step, 10), {}, best=best)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5, 6]


FULL_DISK = """
import resource, signal, sys
sys.path[:0] = {path!r}
import test_checkpoints as t
from dflash import errors
directory = t.pathlib.Path({directory!r})
with t.Checkpoints(directory / "checkpoints", keep_last=2) as checkpoints:
    checkpoints.restore(t.like(t.make_state(0)), print)
    # Writing past this many bytes of any file fails from here on, as on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
        checkpoints.save(3, t.make_state(3), {{}}, best=None)
        checkpoints.wait()
    except errors.WorkdirError as error:
        print(error)
"""


def test_a_full_disk_is_one_line_and_keeps_the_last_good(two_saved):
    """Simulates a full disk by a limit on file sizes, in a separate process."""
    path = [str(TESTS / "training"), str(TESTS), str(TESTS.parent)]
    done = run_python(FULL_DISK.format(path=path, directory=str(two_saved)), check=True)
    assert done.stdout == (
        f"{two_saved}/checkpoints: checkpoint of step 3 cannot be written: File too large; "
        "the last good one, of step 2, is kept\n"
    )
    assert "Traceback" not in done.stderr
    restored, notes = restore(two_saved)
    assert (restored.step, notes) == (2, [])


def test_checksums_do_not_depend_on_the_sharding():
    mesh = toy.Run(pathlib.Path("unused"), mesh=(2, 2, 2)).sharding
    array = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    split = jax.device_put(array, mesh.named(array.shape, ("embed", "vocab")))
    one, other = (states.checksums({"x": x})["x"] for x in (jnp.asarray(array), split))
    assert int(one) == int(other)
    changed = array.copy()
    changed.view(np.uint32)[3, 3] ^= 1
    assert int(states.checksums({"x": jnp.asarray(changed)})["x"]) != int(one)
