"""C++ kernels that are compiled for the CPU of the machine, at their first use.

    ~/.cache/dflash/kernels/0.10.2-1c8c1bf5ef1e-3f08….so

The environment variable DFLASH_CPU_KERNELS is another directory for them, or "off".
"""

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
    return next((found for name in names if name and (found := shutil.which(name))), None)


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
        if sys.stderr.isatty():
            print("compiling CPU kernels, once …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            made = pathlib.Path(scratch) / "library.so"
            files_in_c = map(str, sorted(source.glob("*.cc")))
            command = [compiler, *_FLAGS, f"-I{include}", *files_in_c, "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
            made.replace(library)
    return library
