"""Settings that must stand before jax is imported: eight CPU devices, and quick compilation."""

import atexit
import gc
import os
import pathlib
import shutil
import signal
import sys
import tempfile

# Modules that several tests share lie beside this file.
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support import xla_flags

MOST_MAPPINGS = 30_000  # of memory, between modules; see `pytest_runtest_teardown`

os.environ["XLA_FLAGS"] = xla_flags.quick(devices=8)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A tenth of the time: no traceback for every operation, and fewer collections while tracing.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
gc.set_threshold(200_000, 50, 1000)
# Programs are kept for one session, whose workers and commands share them, and never for the user.
if "DFLASH_TESTS_PROGRAMS" not in os.environ:
    os.environ["DFLASH_TESTS_PROGRAMS"] = tempfile.mkdtemp(prefix="dflash_tests_")
    atexit.register(shutil.rmtree, os.environ["DFLASH_TESTS_PROGRAMS"], ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["DFLASH_TESTS_PROGRAMS"]
# A job in the background ignores ctrl-C, and so would every command that the tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_teardown(item, nextitem):
    """Between modules, drops what is compiled if it takes too many memory mappings.

    Each kernel of a program has mappings of its own (jaxlib 0.12 makes far more than 0.10), and
    the kernel of Linux allows 65,530 to a process: past them, loading a program crashes it.
    """
    if nextitem is not None and nextitem.module is item.module:
        return
    if _num_mappings() < MOST_MAPPINGS:
        return
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and pathlib.Path(file).is_relative_to(pathlib.Path(__file__).parent):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    sys.modules["jax"].clear_caches()
    gc.collect()


def _num_mappings() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0
