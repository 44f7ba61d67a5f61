import pytest
from support import run_python

from dflash.runs import cpu_kernels

SIZE = 64 * 2**20
BEGIN = """
import ctypes, resource, sys
from dflash.runs import cpu_kernels

if sys.argv[1] == "tuned" and not cpu_kernels.tune_malloc():
    sys.exit("refused")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
"""
FAULTS = f"""
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc({SIZE})
    ctypes.memset(block, 1, {SIZE})
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(program, mode):
    """Returns the number that a program prints in a process of its own."""
    done = run_python(BEGIN + program, mode)
    if "refused" in done.stderr:
        pytest.skip("this C library refuses a setting")
    assert not done.returncode, done.stderr
    return int(done.stdout)


def test_a_block_is_used_again_without_page_faults():
    # Pages of a block of this size are 16,384 small ones, or 32 large ones.
    assert run(FAULTS, "tuned") < 16 < run(FAULTS, "default")


def test_a_c_library_without_the_function_is_left_alone(monkeypatch):
    monkeypatch.setattr(cpu_kernels.ctypes, "CDLL", lambda _: object())
    assert not cpu_kernels.tune_malloc.__wrapped__()
