"""C++ kernels that are compiled for the CPU of the machine, at their first use.

    ~/.cache/dflash/kernels/0.10.2-1c8c1bf5ef1e-3f08….so

The environment variable DFLASH_CPU_KERNELS is another directory for them, or "off".
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from dflash.runs import compilation_cache
from dflash.storage import files, paths

VARIABLE = "DFLASH_CPU_KERNELS"
OFF = "off"

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O2", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
_SECONDS = 300  # Limit for compiling.
LARGEST = 256 * 2**20  # Bytes of the largest block that is kept.

# Of <malloc.h> of glibc.
_MXFAST, _TRIM_THRESHOLD, _MMAP_THRESHOLD = 1, -1, -3


def is_off() -> bool:
    """Returns whether the environment turns the kernels off."""
    return os.environ.get(VARIABLE) == OFF


def directory() -> pathlib.Path:
    """Returns the directory of compiled kernels."""
    where = os.environ.get(VARIABLE)
    return pathlib.Path(where) if where else paths.cache_directory("kernels")


def find_compiler() -> str | None:
    """Returns the path of the C++ compiler: $CXX, or the first one of the path."""
    names = (os.environ.get("CXX"), *_COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)


def compile_library(compiler: str, source: pathlib.Path, include: str) -> pathlib.Path:
    """Returns the library for this processor, after compiling it unless it is in the directory.

    Args:
      source: Directory of the files in C++, *.cc, and their headers.
      include: Directory of the headers of XLA's foreign function interface.
    Raises:
      OSError: The directory cannot be used, or others may write to it.
      subprocess.SubprocessError: The compiler fails, or takes too long.
    """
    root = directory()
    digest = hashlib.sha256(" ".join((compiler, *_FLAGS)).encode())
    for path in sorted((*source.glob("*.cc"), *source.glob("*.h"))):
        digest.update(path.read_bytes())
    library = root / f"{compilation_cache.machine()}-{digest.hexdigest()[:12]}.so"
    files.make_private(root)
    for path in (root, library):
        if path.exists() and (problem := compilation_cache.why_unsafe(path)):
            raise OSError(f"{path}: {problem}")
    if not library.exists():
        print("compiling CPU kernels, once …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            output = pathlib.Path(scratch) / "library.so"
            files_in_c = map(str, sorted(source.glob("*.cc")))
            command = [compiler, *_FLAGS, f"-I{include}", *files_in_c, "-o", str(output)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
            output.replace(library)
    return library


@functools.cache
def tune_malloc() -> bool:
    """Fits glibc's allocator to XLA's programs; returns False where a setting is not possible.

    XLA allocates the scratch memory of a program at every call, and frees it afterwards. By default
    glibc returns blocks of more than 32 MiB to the system, so that the next call has a page fault
    for every page that it touches. With these settings they stay in the process, which keeps up to
    twice `LARGEST` bytes more.

    A call also allocates a small block for every constant of its program, of which there may be a
    thousand. By default glibc keeps the freed ones apart in bins, and merges all of them when a
    large block is allocated, which is at the next call. Now each is merged when it is freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: LARGEST, _TRIM_THRESHOLD: 2 * LARGEST, _MXFAST: 0}
    # Older versions refuse such a threshold, and return 0.
    accepted = [mallopt(name, size) == 1 for name, size in settings.items()]
    return all(accepted)
