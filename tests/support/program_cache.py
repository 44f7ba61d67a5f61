"""Directory in which test runs keep compiled programs for later runs."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform

MOST_BYTES = 4 * 2**30


def directory() -> pathlib.Path:
    """Creates and returns the directory for the programs of this jaxlib on this machine.

    jax finds a program by what it is lowered to, so a directory serves all versions of the sources.
    """
    programs = _root() / "programs" / key()
    programs.mkdir(parents=True, exist_ok=True)
    bound(programs, MOST_BYTES)
    return programs


def kernels() -> pathlib.Path:
    """Returns the directory for compiled CPU kernels, which few sources change."""
    return _root() / "kernels"


def bound(programs: pathlib.Path, most_bytes: int) -> None:
    """Removes the files that were used longest ago until the others take up `most_bytes` at most.

    jax's own bound, `jax_compilation_cache_max_size`, takes a lock at every access and lists the
    whole directory at every new program; this one runs once, before the tests.
    """
    by_age = sorted(_last_use(path) for path in programs.iterdir())
    excess = sum(size for _, size, _ in by_age) - most_bytes
    for _, size, path in by_age:
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size


def key() -> str:
    """Returns a hash of the versions and of the processor that programs are compiled for."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    words = (*versions, platform.python_version(), platform.machine(), _processor())
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _last_use(path: pathlib.Path) -> tuple[float, int, pathlib.Path]:
    """Returns when a file was written or read last, its size, and its path."""
    status = path.stat()
    return max(status.st_atime, status.st_mtime), status.st_size, path


def _root() -> pathlib.Path:
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return base / "dflash_tests"


def _processor() -> str:
    """Returns the processor's instruction sets, which programs are compiled for."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
