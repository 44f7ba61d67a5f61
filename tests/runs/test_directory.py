"""The work directory of a run, whatever the run does: one at a time, one config, whole files."""

import dataclasses
import errno
import os
import pathlib

import pytest
from support import failure

from dflash import errors
from dflash.config import loader, schema
from dflash.runs.directory import RunDirectory
from dflash.storage import files

CONFIG = schema.DecodeRun(target=schema.TargetConfig(checkpoint="weights"))


def changed(**values):
    return dataclasses.replace(CONFIG, decode=dataclasses.replace(CONFIG.decode, **values))


HOTTER = changed(temperature=0.8)


def take(path, config=CONFIG, **options):
    return RunDirectory(path, config, is_used=lambda path: (path / "results").exists(), **options)


def use(path, config=CONFIG):
    """Leaves results in a directory."""
    with take(path, config) as held:
        held.write("results", "precious")


def refusal(path, config=CONFIG):
    """Takes a directory that must be refused, and returns the one line of complaint."""
    before = contents(path)
    message = failure(take, path, config, kind=errors.WorkdirError)
    assert contents(path) == before
    return message


def contents(path):
    """Returns the contents of a directory's files by name, without the lock."""
    there = path.iterdir() if path.is_dir() else []
    return {one.name: one.read_bytes() for one in there if one.name != ".lock"}


def test_a_directory_is_made_and_holds_the_config(tmp_path):
    path = tmp_path / "new" / "run"
    with take(path) as held:
        assert held.path == path
        held.write_json("results", {"x": 1.5})
    assert path.stat().st_mode & 0o777 == 0o700, "it may hold prompts"
    assert (path / "results").read_text() == '{\n  "x": 1.5\n}\n'
    assert loader.load(path / "config.yml") == CONFIG


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with take(None) as held:
        held.write("results", "x")
        assert held.path is None
    assert list(tmp_path.iterdir()) == []


def test_other_processes_of_a_run_touch_nothing(tmp_path, monkeypatch):
    with take(tmp_path / "run"):
        monkeypatch.setattr("jax.process_index", lambda: 1)
        with take(tmp_path / "run", HOTTER) as other:
            assert other.path == tmp_path / "run"
    assert loader.load(tmp_path / "run" / "config.yml") == CONFIG


def test_another_config_is_refused(tmp_path):
    use(tmp_path)
    other = dataclasses.replace(HOTTER, dtype="float32")
    assert refusal(tmp_path, other) == (
        f"{tmp_path}: belongs to a run of another config (decode.temperature: 0.0 there, 0.8 here;"
        ' dtype: "bfloat16" there, "float32" here): use another --workdir, or delete this one'
    )


def test_keys_that_may_change(tmp_path):
    use(tmp_path)
    take(tmp_path, HOTTER, may_change=lambda key: key == "decode.temperature").close()
    assert loader.load(tmp_path / "config.yml") == HOTTER
    with pytest.raises(errors.WorkdirError, match=r"decode\.temperature: 0.8 there, 0.0 here"):
        take(tmp_path, may_change=lambda key: key != "decode.temperature")


@dataclasses.dataclass(frozen=True)
class LaterDecode(schema.DecodeConfig):
    """Keys of a later version."""

    draft_width: int = 3


@dataclasses.dataclass(frozen=True)
class LaterRun(schema.DecodeRun):
    """A run of a later version, which has a key and a group more."""

    decode: LaterDecode = dataclasses.field(default_factory=LaterDecode)
    serving: schema.MeshConfig = dataclasses.field(default_factory=schema.MeshConfig)


def test_a_later_version_continues(tmp_path):
    """A key that it has added has its default there."""
    use(tmp_path)
    later = LaterRun(target=CONFIG.target)
    take(tmp_path, later).close()
    assert loader.load(tmp_path / "config.yml", schema=LaterRun) == later
    assert loader.config_hash(later) == loader.config_hash(CONFIG)
    wider = dataclasses.replace(later, decode=LaterDecode(draft_width=4))
    assert "(decode.draft_width: 3 there, 4 here)" in refusal(tmp_path, wider)
    assert loader.config_hash(wider) != loader.config_hash(CONFIG)


def test_a_run_that_left_nothing_makes_room(tmp_path):
    take(tmp_path).close()
    take(tmp_path, HOTTER).close()
    assert loader.load(tmp_path / "config.yml") == HOTTER


def test_files_of_other_programs_are_not_overwritten(tmp_path):
    path = tmp_path / "config.yml"
    path.write_text("theme: dark\n")
    assert refusal(tmp_path).startswith(f"{path}:1: theme: unknown key; ")
    path.write_text("theme: [dark\n")
    assert refusal(tmp_path).startswith(f"{path}:2: not valid YAML: ")


def test_a_key_that_is_gone_is_one_clear_line(tmp_path):
    use(tmp_path)
    path = tmp_path / "config.yml"
    path.write_text(
        loader.to_yaml(CONFIG).replace("  seed: 0", "  seed: 0\n  speculate: 3\n  zzz: 1")
    )
    (line,) = [n for n, t in enumerate(path.read_text().splitlines(), 1) if "speculate" in t]
    message = refusal(tmp_path)
    assert message.startswith(f"{path}:{line}: decode.speculate: unknown key; expected one of ")
    assert message.endswith(
        " (and 1 more); another command or version has written this config: use another --workdir, "
        "or the version that wrote it"
    )


def test_results_without_config(tmp_path):
    (tmp_path / "results").write_text("precious")
    assert refusal(tmp_path) == (
        f"{tmp_path / 'config.yml'}: missing, so the config of the results is unknown: "
        "use another --workdir"
    )


def test_two_runs_at_once(tmp_path):
    with take(tmp_path):
        assert refusal(tmp_path) == (
            f"{tmp_path}: in use by another run: wait for it, or use another --workdir"
        )
    take(tmp_path).close()  # free again


def test_a_lock_that_is_released_in_time(tmp_path, monkeypatch):
    """A run that was killed a moment ago may hold its lock a little longer."""
    first = take(tmp_path)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: first.close())
    take(tmp_path).close()


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    take(tmp_path).close()


def test_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file") == f"{tmp_path / 'file'}: cannot be written: not a directory"
    inside = tmp_path / "file" / "run"
    assert refusal(inside) == f"{inside}: cannot be written: Not a directory"


@pytest.mark.parametrize("stage", ["mkdir", "open"])
def test_no_permission(tmp_path, monkeypatch, stage):
    # Modes do not stop root, as whom tests often run, so the refusal is simulated.
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    owner = pathlib.Path if stage == "mkdir" else os
    monkeypatch.setattr(owner, stage, refuse)
    with pytest.raises(errors.WorkdirError, match=r"cannot be written: Permission denied$"):
        take(tmp_path / "run")


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "x"
    files.write_whole(path, "one")
    files.write_whole(path, b"two\xff")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"two\xff", ["x"])

    def replace(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, "three")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"two\xff", ["x"])


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """The content is synced under a temporary name first, then the directory."""
    path, synced = tmp_path / "x", []
    fsync = os.fsync

    def record(descriptor):
        synced.append((os.fstat(descriptor).st_ino, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    files.write_whole(path, "content")
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]
