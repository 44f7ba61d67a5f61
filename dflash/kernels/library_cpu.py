"""Library of the kernels in C++, which XLA calls on CPUs through its foreign function interface.

It is compiled at its first use; see `runs/cpu_kernels.py`. Without a compiler, XLA computes
everything.
"""

import ctypes
import functools
import pathlib
import subprocess
import sys
import threading

import jax

from dflash.parallel.sharding import Sharding
from dflash.runs import cpu_kernels

MATMUL = "dflash_matmul"
ATTENTION = "dflash_attention"
SPLIT_HEADS = "dflash_split_heads"
ASSEMBLE = "dflash_assemble"
FINITE = "dflash_finite"

_SYMBOLS = {
    MATMUL: "DflashMatmul",
    ATTENTION: "DflashAttention",
    SPLIT_HEADS: "DflashSplitHeads",
    ASSEMBLE: "DflashAssemble",
    FINITE: "DflashFinite",
}
_COMPILING = threading.Lock()  # Programs are traced by several threads.


def serves(sharding: Sharding) -> bool:
    """Returns whether arrays of a mesh are on one CPU, and the library is there."""
    return sharding.platform == "cpu" and sharding.mesh.size == 1 and is_available()


def is_available() -> bool:
    """Returns whether the library is there; the first call compiles it and tells XLA of it."""
    return _library() is not None


def panel_columns() -> int:
    """Returns the number of columns of a panel of weights; see `matmul_cpu.to_panels`.

    Raises:
      RuntimeError: There is no library.
    """
    library = _library()
    if library is None:
        raise RuntimeError("panels of weights need the CPU kernels, which are not there")
    return library.DflashPanelColumns()


def _library() -> ctypes.CDLL | None:
    with _COMPILING:
        return _register()


@functools.cache
def _register() -> ctypes.CDLL | None:
    """Makes the kernels known to XLA; returns None, after a line on stderr, if that fails."""
    compiler = cpu_kernels.find_compiler()
    if cpu_kernels.is_off() or compiler is None:
        return None
    source = pathlib.Path(__file__).parent
    try:
        path = cpu_kernels.compile_library(compiler, source, jax.ffi.include_dir())
        library = ctypes.cdll.LoadLibrary(str(path))
        handlers = {
            target: jax.ffi.pycapsule(getattr(library, symbol))
            for target, symbol in _SYMBOLS.items()
        }
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        print(f"CPU kernels off: {_first_error(text)}", file=sys.stderr, flush=True)
        return None
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return library


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
