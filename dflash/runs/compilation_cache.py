"""Location and size limit of jax's persistent compilation cache.

    ~/.cache/dflash/programs/0.10.2-1c8c1bf5ef1e/       one jaxlib version on one kind of CPU
        jit_generate-4f0c….-cache                       a program, as jax writes it

A program that was compiled for one kind of CPU may crash on another, and home directories are
shared between machines, so each kind has a directory of its own. Their total size is limited at the
start of a run. jax itself limits a single directory only, with a lock that needs write access.

A program is code that runs with this user's rights. So nobody else may write where they are kept.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import stat
import sys
import time
import warnings
import zlib
from collections.abc import Iterator

from dflash.storage import files, paths

OFF = "off"
MAX_BYTES = 2 * 2**30  # Limit for all programs together.
_PROGRAMS = "*/*-cache"  # Programs below the root; jax appends the suffix.
_TROUBLE = "Error (reading|writing) persistent compilation cache entry"
_CHECKED = 0o400  # File mode of a program that was verified to be complete.
_SETTLED_S = 60.0  # Minimum age of a file to assume that no process is still writing it.


def default_root() -> pathlib.Path:
    """Returns the root directory of compiled programs, in the user's cache directory."""
    return paths.cache_directory("programs")


def enable(where: str | None = None) -> pathlib.Path | None:
    """Enables jax's compilation cache; an unusable directory only disables it.

    A directory that others may write to is not used, and a line on stderr says so.

    jax's own settings (JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE) apply unless
    `where` overrides them.

    Args:
      where: One of "off", a directory, or None for the user's cache directory.
    Returns:
      Directory of the programs; None if the cache is disabled.
    """
    import jax

    if where == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
    if not jax.config.jax_enable_compilation_cache:
        return None
    location = jax.config.jax_compilation_cache_dir
    if where is not None or location is None:
        root = default_root() if where is None else paths.to_path(where)
        directory = root / machine()
        try:
            files.make_private(directory)
        except OSError:
            return None
        if _is_refused(root) or _is_refused(directory):
            return None
        if not paths.in_bucket(root):  # Never delete objects in a bucket.
            trim(root)
        location = str(directory)
        jax.config.update("jax_compilation_cache_dir", location)
    elif _is_refused(paths.to_path(location)):
        return None
    # Most programs of a run compile in less than jax's default of a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A program that cannot be read or written is simply compiled again, so hide jax's warning.
    warnings.filterwarnings("ignore", message=_TROUBLE)
    return paths.to_path(location)


def _is_refused(directory: pathlib.Path) -> bool:
    """Disables the cache if others may write to its directory; returns whether they may."""
    if paths.in_bucket(directory) or not directory.exists():
        return False
    problem = why_unsafe(directory)
    if problem is None:
        return False
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    print(f"compilation cache off: {directory}: {problem}", file=sys.stderr, flush=True)
    return True


def why_unsafe(path: pathlib.Path) -> str | None:
    """Returns why code at an existing path must not run: others may write it; None if it may."""
    entry, target = path.lstat(), path.stat()
    if _is_foreign(entry) or _is_foreign(target):
        return "belongs to another user"
    if target.st_mode & 0o022 and not target.st_mode & stat.S_ISVTX:
        return "other users may write to it (chmod go-w, and delete its programs)"
    return None


def _is_foreign(status: os.stat_result) -> bool:
    return status.st_uid not in (os.geteuid(), 0)


def machine() -> str:
    """Returns the name of the machine's directory, from jaxlib's version and the CPU's features."""
    jaxlib = importlib.metadata.version("jaxlib")
    return f"{jaxlib}-{hashlib.sha256(_cpu().encode()).hexdigest()[:12]}"


def _cpu() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.version()}"
    fields = dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
    named = {key.strip(): value for key, value in fields.items()}
    keys = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")
    return "\n".join([platform.machine(), *(named.get(key, "") for key in keys)])


def trim(root: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
    """Deletes damaged and foreign programs, and the least recently used ones beyond `max_bytes`.

    jax writes programs in place. A killed run or a full disk leaves a truncated program, which jax
    would neither use nor replace.
    """
    programs = []
    for path in root.glob(_PROGRAMS):
        with contextlib.suppress(OSError):  # Another process may have deleted it.
            status = path.stat()
            if _is_foreign(path.lstat()) or _is_foreign(status) or _is_damaged(path, status):
                path.unlink()
            else:
                used = max(status.st_atime, status.st_mtime)
                programs.append((used, status.st_size, path))
    total = sum(size for _, size, _ in programs)
    for _, size, path in sorted(programs):
        if total <= max_bytes:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size


def _is_damaged(path: pathlib.Path, status: os.stat_result) -> bool:
    """Returns whether a program is incomplete; marks complete ones, to check each only once."""
    if status.st_mode & 0o777 == _CHECKED or time.time() - status.st_mtime < _SETTLED_S:
        return False
    content = path.read_bytes()
    try:
        zlib.decompress(content)
    except zlib.error:
        # With the zstandard package, jax uses another format, and verifies it on reading.
        return not content.startswith(b"\x28\xb5\x2f\xfd")
    path.chmod(_CHECKED)
    # Restore the times, since this check must not count as a use.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return False


@contextlib.contextmanager
def count_hits() -> Iterator[list[str]]:
    """Yields a list that gets one entry for every program that is read from the cache."""
    import jax

    hits: list[str] = []

    def listen(event: str, **_) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)
