"""Directory in which test runs keep compiled programs for later runs."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil

PACKAGE = pathlib.Path(__file__).parents[2] / "dflash"
# A change in any of these packages may change a program.
COMPILED = ("drafters", "inference", "kernels", "layers", "models", "parallel", "training")
_KEPT = 4  # directories, the most recently used ones


def directory() -> pathlib.Path:
    """Creates and returns the directory for the programs of these sources on this machine.

    jax finds a program by what it is lowered to, so an outdated one is never used. The key only
    bounds how much is kept: directories of other sources are removed, the oldest first.
    """
    base = _root() / "programs"
    found = base / key(PACKAGE)
    found.mkdir(parents=True, exist_ok=True)
    os.utime(found)
    by_age = sorted(base.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for outdated in by_age[_KEPT:]:
        shutil.rmtree(outdated, ignore_errors=True)
    return found


def kernels() -> pathlib.Path:
    """Returns the directory for compiled CPU kernels, which few sources change."""
    return _root() / "kernels"


def _root() -> pathlib.Path:
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return base / "dflash_tests"


def key(package: pathlib.Path) -> str:
    """Returns a hash of the jaxlib version, the processor, and the sources that are compiled."""
    digest = hashlib.sha256()
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    for word in (*versions, platform.python_version(), platform.machine(), _processor()):
        digest.update(word.encode() + b"\0")
    for name in COMPILED:
        for path in sorted((package / name).rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Returns the processor's instruction sets, which programs are compiled for."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
