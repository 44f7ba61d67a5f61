"""Settings that must stand before jax is imported: eight CPU devices, and quick compilation."""

import atexit
import gc
import importlib.metadata
import os
import pathlib
import shutil
import signal
import sys
import tempfile

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # The tests compile many tiny programs and run each a few times.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # With this and the next it takes less than half the time (7.0 against 3.0 s for an engine).
    "--xla_cpu_parallel_codegen_split_count=1",
)
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Later ones have no other way, and abort at a flag that they do not know.
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)

MOST_MAPPINGS = 30_000  # of memory, between modules; see `pytest_runtest_teardown`

os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
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
# Modules that several tests share lie beside this file.
sys.path.insert(0, str(pathlib.Path(__file__).parent))


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
