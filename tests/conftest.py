"""Settings that must stand before jax is imported: eight CPU devices, and quick compilation."""

import contextlib
import ctypes
import gc
import importlib.util
import os
import pathlib
import signal
import sys

# Modules that several tests share lie beside this file.
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import hypothesis
import pytest
from support import program_cache, tiers, xla_flags

# What a worker may hold between modules; within one, twice as much. See `pytest_runtest_teardown`.
MOST_MAPPINGS = 20_000
MOST_MEMORY_KIB = 3 * 2**20
TESTS_PER_CHECK = 4  # Within a module; between two modules it is always checked.
_num_unchecked = 0

os.environ["XLA_FLAGS"] = xla_flags.quick(devices=8)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The TPU compiler acquires no chip: it asks for none, and several may run at the same time.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
# A tenth of the time: no traceback for every operation, and fewer collections while tracing.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
gc.set_threshold(1_000_000, 50, 1000)
# Workers, commands and later runs share programs; those of users are left alone.
if "DFLASH_TESTS_PROGRAMS" not in os.environ:
    os.environ["DFLASH_TESTS_PROGRAMS"] = str(program_cache.directory())
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["DFLASH_TESTS_PROGRAMS"]
os.environ.setdefault("DFLASH_CPU_KERNELS", str(program_cache.kernels()))
# Compiling takes longer than loading from 50 ms on.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
# The same examples in every run, for as long as they take: a busy machine finds no other faults.
hypothesis.settings.register_profile(
    "same", deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("same")
# A job in the background ignores ctrl-C, and so would every command that the tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests of tiers/slow.txt too")
    parser.addoption("--system", action="store_true", help="run the tests of tiers/system.txt too")


def pytest_configure(config):
    for tier in tiers.TIERS:
        config.addinivalue_line("markers", f"{tier}: listed in tests/tiers/{tier}.txt")
    config.addinivalue_line("markers", "tpu_compiler: compiles for TPUs, without a TPU")


def pytest_runtest_setup(item):
    # The compiler takes 0.7 GB and runs on Linux on x86-64 only: the extra `test` leaves it out.
    if item.get_closest_marker("tpu_compiler") and not importlib.util.find_spec("libtpu"):
        pytest.skip("needs the TPU compiler: pip install 'jax[tpu]'")


@pytest.hookimpl(tryfirst=True)  # before -k and -m deselect others
def pytest_collection_modifyitems(config, items):
    """Marks tests by tier; deselects tiers that are not asked for by option, name or marker."""
    items.sort(key=_place)
    if config.args == config.getini("testpaths") and (
        stale := tiers.stale(item.nodeid for item in items)
    ):
        raise pytest.UsageError(f"no such test: {stale[0]}")
    tier_of = {item: tiers.tier_of(item.nodeid) for item in items}
    for item, tier in tier_of.items():
        if tier:
            item.add_marker(tier)
    named = any(tier in config.getoption("markexpr") for tier in tiers.TIERS)
    if named or any("::" in name for name in config.args):
        return
    left_out = {tier for tier in tiers.TIERS if not config.getoption(tier)}
    deselected = [item for item in items if tier_of[item] in left_out]
    if deselected:
        items[:] = [item for item in items if tier_of[item] not in left_out]
        config.hook.pytest_deselected(items=deselected)


def _place(item) -> tuple[bool, str, str]:
    """Returns a key that puts tests side by side which share engines: of a form, of a module."""
    if not item.nodeid.startswith(("tests/contract/", "tests/inference/")):
        return True, "", ""
    form = item.callspec.params.get("form", "") if hasattr(item, "callspec") else ""
    return False, item.nodeid.partition("::")[0], str(form)


def pytest_runtest_teardown(item, nextitem):
    """Drops what is compiled if it takes too much memory, or too many mappings of it.

    Each kernel of a program has mappings of its own (jaxlib 0.12 makes far more than 0.10), and
    the kernel of Linux allows 65,530 to a process: past them, loading a program crashes it. Its
    code takes memory too, some GiB after a thousand tests.
    """
    global _num_unchecked
    _num_unchecked += 1
    # Counting mappings takes milliseconds, as long as a small test.
    same_module = nextitem is not None and nextitem.module is item.module
    if not same_module and "jax" in sys.modules:
        # A command with compilation_cache=off turns the cache off for the whole process.
        sys.modules["jax"].config.update("jax_enable_compilation_cache", True)
    if nextitem is None or (same_module and _num_unchecked < TESTS_PER_CHECK):
        return
    _num_unchecked = 0
    share = max(_num_mappings() / MOST_MAPPINGS, _memory_kib() / MOST_MEMORY_KIB)
    if share < (2 if same_module else 1):
        return
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and pathlib.Path(file).is_relative_to(pathlib.Path(__file__).parent):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    sys.modules["jax"].clear_caches()
    gc.collect()
    if sys.platform == "linux":  # the C library keeps what was freed, some GiB of it
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _num_mappings() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0


def _memory_kib() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return 0
