"""Tests of the memory that the C library keeps."""

import subprocess
import sys

import pytest

from dflash.runs import cpu_memory

SIZE = 64 * 2**20
FAULTS = f"""
import ctypes, resource, sys
from dflash.runs import cpu_memory

if sys.argv[1] == "keep" and not cpu_memory.keep_freed():
    sys.exit("refused")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc({SIZE})
    ctypes.memset(block, 1, {SIZE})
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    """Page faults of the second use of a block of 64 MiB, in a new process."""
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True)
    if "refused" in done.stderr:
        pytest.skip("this C library refuses the threshold")
    assert not done.returncode, done.stderr
    return int(done.stdout)


def test_a_block_is_used_again_without_page_faults():
    # Pages of a block of this size are 16,384 small ones, or 32 large ones.
    assert faults("keep") < 16 < faults("default")


def test_a_c_library_without_the_function_is_left_alone(monkeypatch):
    monkeypatch.setattr(cpu_memory.ctypes, "CDLL", lambda _: object())
    assert not cpu_memory.keep_freed.__wrapped__()
