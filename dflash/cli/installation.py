"""Probes of the installation for `dflash doctor`, which work whatever is missing."""

import contextlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys

from dflash.version import DISTRIBUTION

# Distributions that every command needs, as in pyproject.toml.
REQUIRED = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "absl-py", "jinja2"),
    *("matplotlib", "ml-collections", "pyarrow", "pyyaml", "rich", "sentencepiece"),
    "tensorboardX",
)
# Extras: (name, distributions, purpose).
EXTRAS = (
    (
        "hf",
        ("huggingface_hub", "tiktoken", "tokenizers"),
        "hf:org/name downloads; tokenizer.json (Qwen, Llama)",
    ),
    ("gguf", ("gguf", "tokenizers"), "models in GGUF files; wheel:PACKAGE/PATH"),
    (
        "serve",
        ("starlette", "uvicorn", "prometheus-client", "pydantic", "h11"),
        "dflash serve",
    ),
    ("gcs", ("gcsfs",), "paths in buckets: gs://bucket/name"),
    ("grammar", ("llguidance",), "structured output: JSON schemas, regular expressions"),
    ("tfds", ("tensorflow-datasets",), "training on data sets of tensorflow-datasets"),
    ("rl", ("google-tunix",), "rollouts in Tunix, dflash.rl"),
    (
        "clients",
        ("langchain-openai", "openai-agents", "pydantic-ai-slim"),
        "tests of the server with frameworks for agents",
    ),
    ("tpu", ("libtpu",), "TPUs; dflash compile, on any Linux host"),
    ("parity", ("torch", "transformers"), "tests against reference implementations"),
    ("docs", ("mkdocs-material", "mkdocstrings"), "the documentation site"),
    ("test", ("pytest", "hypothesis", "ruff"), "the test suite"),
)
# Environment variables that the report shows.
VARIABLES = (
    *("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES"),
    *("DFLASH_CPU_KERNELS", "CXX"),
    *("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
)
_PROBE = (
    "import collections, jax; "
    "found = collections.Counter(d.device_kind for d in jax.devices()); "
    "print(', '.join(f'{count} × {name}' for name, count in found.items()))"
)
_PROBE_SECONDS = 120
_COMMAND = "dflash.__main__:main"  # as in pyproject.toml


def version(name: str) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except Exception:  # A broken installation can fail in many ways.
        return None


def clashing_distributions() -> list[str]:
    """Returns the names of other installed distributions that own the module or the command.

    pip installs them side by side without a word, and the files of the later one win.
    """
    names = {_clashing_name(other) for other in importlib.metadata.distributions()}
    return sorted(names - {None, DISTRIBUTION})


def _clashing_name(other: importlib.metadata.Distribution) -> str | None:
    try:
        scripts = other.entry_points.select(group="console_scripts", name="dflash")
        owns_command = any(script.value != _COMMAND for script in scripts)
        # Only installed distributions have a RECORD; a source tree on the path does not count.
        owns_module = "\ndflash/__init__.py," in f"\n{other.read_text('RECORD')}"
        return other.name if owns_command or owns_module else None
    except Exception:  # A broken installation can fail in many ways.
        return None


def devices() -> tuple[str, bool]:
    """Returns the devices that jax finds, or why it finds none; and whether it finds any.

    jax runs in another process, since a wrong flag in the environment aborts it, and a device that
    is in use may not answer.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_PROBE_SECONDS} s; is another process using them?", False
    except OSError as error:
        return f"cannot be asked: {error.strerror}", False
    if done.returncode == 0:
        return done.stdout.strip(), True
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return f"none: {lines[-1][:300] if lines else f'jax ended with {done.returncode}'}", False


def cpu_kernels() -> str:
    """Returns what compiles the kernels for CPUs, without compiling anything."""
    from dflash.runs import cpu_kernels

    if cpu_kernels.is_off():
        return f"XLA's ({cpu_kernels.VARIABLE}={cpu_kernels.OFF})"
    compiler = cpu_kernels.find_compiler()
    return f"compiled by {compiler}" if compiler else "XLA's; a C++ compiler makes decoding faster"


def cache_directories() -> dict[str, pathlib.Path]:
    """Returns the cache directories of this package and of the Hugging Face hub, by name."""
    from dflash.data import store
    from dflash.runs import compilation_cache, cpu_kernels

    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = pathlib.Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()
    return {
        "programs": compilation_cache.default_root(),
        "cpu kernels": cpu_kernels.directory(),
        "data sets": store.data_directory(None),
        "hub": pathlib.Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser(),
    }


def size_bytes(directory: pathlib.Path) -> int:
    """Returns the bytes of all files below a directory; follows no links."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def cores() -> str:
    """Returns a description of the processor cores."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} cores"


def memory() -> str:
    """Returns a description of the main memory."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return "memory unknown"
    return f"{total / 2**30:.0f} GiB of memory"
