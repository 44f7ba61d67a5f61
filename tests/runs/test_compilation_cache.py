"""Location and trimming of the compilation cache; problems with it never end a run."""

import os
import sys
import types
import zlib

import pytest
from support import run_python

from dflash.runs import compilation_cache as cache

PROGRAM = zlib.compress(os.urandom(3000))
OLD = 1_000_000.0  # long settled, in seconds since 1970


def keep(root, name, content=PROGRAM, used=OLD):
    path = root / "some-machine" / f"jit_{name}-0123-cache"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (used, used))
    return path


def kept(root):
    return sorted(path.name.split("-")[0].removeprefix("jit_") for path in root.glob("*/*-cache"))


def run(code, tmp_path, **environment):
    """Runs code in a process of its own, which compiles and runs a program; returns its output."""
    code = f"""
        from dflash.runs import compilation_cache as cache
        {code}
        import jax, jax.numpy as jnp
        with cache.count_hits() as hits:
            assert float(jax.jit(lambda x: jnp.sin(x) + 41)(0.0)) == 41
        print(directory, len(hits))
    """
    kept_out = {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"}
    clean = {key: value for key, value in os.environ.items() if key not in kept_out}
    done = run_python(code, env=clean | {"XDG_CACHE_HOME": str(tmp_path / "xdg")} | environment)
    assert (done.returncode, done.stderr) == (0, "")
    directory, hits = done.stdout.split()
    return directory, int(hits)


def test_the_second_process_takes_the_programs_of_the_first(tmp_path):
    code = "directory = cache.enable()"
    directory = str(tmp_path / "xdg" / "dflash" / "programs" / cache.machine())
    assert run(code, tmp_path) == (directory, 0)
    assert run(code, tmp_path) == (directory, 1)


class Config:
    """The settings of jax in a new process."""

    jax_enable_compilation_cache, jax_compilation_cache_dir = True, None

    def update(self, key, value):
        setattr(self, key, value)


@pytest.fixture
def config(monkeypatch, tmp_path):
    found = Config()
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(config=found))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return found


def test_it_can_be_moved_and_refused(config, tmp_path):
    directory = tmp_path / "here" / cache.machine()
    assert cache.enable(str(tmp_path / "here")) == directory
    assert config.jax_compilation_cache_dir == str(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert cache.enable("off") is None
    assert not config.jax_enable_compilation_cache
    assert not (tmp_path / "xdg").exists()


def test_what_jax_was_told_holds(config, tmp_path, capfd):
    place = tmp_path / "own"
    place.mkdir(mode=0o700)
    config.jax_compilation_cache_dir = str(place)
    assert cache.enable() == place
    place.chmod(0o777)
    assert cache.enable() is None
    said = f"compilation cache off: {place}: other users may write to it"
    assert capfd.readouterr().err.startswith(said)
    assert not config.jax_enable_compilation_cache
    place.chmod(0o700)
    assert cache.enable() is None
    assert not (tmp_path / "xdg").exists()


def test_a_place_that_cannot_be_used_is_no_error(config, tmp_path):
    (tmp_path / "xdg").write_text("taken")
    assert cache.enable() is None
    assert config.jax_enable_compilation_cache


def test_a_full_disk_is_no_error(tmp_path):
    """Simulates a full disk by a limit of a few bytes on every file of the process."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)); "
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code = f"{limit}{ignore}directory = cache.enable()"
    assert run(code, tmp_path, PYTHONDONTWRITEBYTECODE="1")[1] == 0


def test_the_least_recently_used_go_first(tmp_path):
    names = "abcde"
    for age, name in enumerate(names):
        keep(tmp_path, name, used=OLD - age)
    size = len(PROGRAM)
    cache.trim(tmp_path, max_bytes=5 * size)
    assert kept(tmp_path) == list(names)
    cache.trim(tmp_path, max_bytes=3 * size + 1)
    assert kept(tmp_path) == ["a", "b", "c"]
    other = keep(tmp_path / "some-machine", "x", used=OLD + 1)
    other.rename(tmp_path / "some-machine" / "notes.txt")
    cache.trim(tmp_path, max_bytes=0)
    assert kept(tmp_path) == []
    assert (tmp_path / "some-machine" / "notes.txt").exists(), (
        "the file does not belong to the cache"
    )


def test_damaged_programs_are_deleted_and_whole_ones_are_read_once(tmp_path, monkeypatch):
    keep(tmp_path, "whole")
    keep(tmp_path, "part", PROGRAM[:-5])
    keep(tmp_path, "empty", b"")
    keep(tmp_path, "otherwise_compressed", b"\x28\xb5\x2f\xfd and so on")
    keep(tmp_path, "just_begun", PROGRAM[:10], used=4e9)
    cache.trim(tmp_path)
    assert kept(tmp_path) == ["just_begun", "otherwise_compressed", "whole"]
    monkeypatch.setattr(zlib, "decompress", lambda content: pytest.fail("read again"))
    (tmp_path / "some-machine" / "jit_otherwise_compressed-0123-cache").unlink()
    cache.trim(tmp_path)
    assert kept(tmp_path) == ["just_begun", "whole"]


def test_machines_are_told_apart(monkeypatch):
    mine = cache.machine()
    assert mine == cache.machine()
    monkeypatch.setattr(cache, "_cpu", lambda: "another CPU")
    assert cache.machine() != mine
    assert cache.machine().partition("-")[0] == mine.partition("-")[0], "the same jaxlib"


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
NOBODY = 65534


@pytest.mark.parametrize("place", ["machine", "root"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_place_that_others_may_write_to_is_not_used(place, mode, tmp_path, config, capfd):
    directory = tmp_path / "root" / cache.machine()
    directory.mkdir(parents=True)
    changed = directory if place == "machine" else directory.parent
    changed.chmod(mode)
    assert cache.enable(str(tmp_path / "root")) is None
    assert not config.jax_enable_compilation_cache
    assert f"{changed}: other users may write to it" in capfd.readouterr().err


@AS_ROOT
@pytest.mark.parametrize("place", ["directory", "link"])
def test_a_place_of_another_user_is_not_used(place, tmp_path, config, capfd):
    directory = tmp_path / "root" / cache.machine()
    directory.parent.mkdir()
    if place == "link":
        (tmp_path / "own").mkdir()
        directory.symlink_to(tmp_path / "own")
    else:
        directory.mkdir(mode=0o755)
    os.chown(directory, NOBODY, NOBODY, follow_symlinks=False)
    assert cache.enable(str(tmp_path / "root")) is None
    assert not config.jax_enable_compilation_cache
    assert f"{directory}: belongs to another user" in capfd.readouterr().err


@AS_ROOT
def test_a_program_of_another_user_is_deleted(tmp_path):
    keep(tmp_path, "own")
    os.chown(keep(tmp_path, "foreign"), NOBODY, NOBODY)
    cache.trim(tmp_path)
    assert kept(tmp_path) == ["own"]
