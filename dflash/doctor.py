"""Says what this installation has: dflash doctor. Works whatever is missing."""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from dflash.cli import subcommand as cli
from dflash.config import merging
from dflash.version import __version__

# Distributions that every command needs, as in pyproject.toml.
REQUIRED = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "absl-py", "jinja2"),
    *("matplotlib", "ml-collections", "pyarrow", "pyyaml", "rich", "safetensors"),
    *("sentencepiece", "tensorboardX", "tensorflow-datasets"),
)
# Optional ones: (extra, distributions, what they are for).
EXTRAS = (
    (
        "hf",
        ("huggingface_hub", "tiktoken", "tokenizers"),
        "hf:org/name downloads; tokenizer.json (Qwen, Llama)",
    ),
    (
        "serve",
        ("starlette", "uvicorn", "prometheus-client", "pydantic", "httptools", "httpx2"),
        "dflash serve; dflash benchmark study.name=serve",
    ),
    ("gcs", ("gcsfs",), "paths in buckets: gs://bucket/name"),
    ("grammar", ("llguidance",), "structured output: JSON schemas, regular expressions"),
    ("tpu", ("libtpu",), "TPUs; dflash compile, on any Linux host"),
    ("parity", ("torch", "transformers"), "tests against reference implementations"),
    ("docs", ("mkdocs-material", "mkdocstrings"), "the documentation site"),
    ("test", ("pytest", "hypothesis", "ruff"), "the test suite"),
)
_VARIABLES = (
    *("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES"),
    *("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
)
_PROBE = (
    "import collections, jax; "
    "found = collections.Counter(d.device_kind for d in jax.devices()); "
    "print(', '.join(f'{count} × {name}' for name, count in found.items()))"
)
_PROBE_SECONDS = 120

SUBCOMMAND = cli.Subcommand(
    "doctor",
    "Says what this installation has: versions, devices, extras that are missing and what each is "
    "for, caches and their sizes. It changes nothing. Paste its output into a report of a problem.",
    examples=("dflash doctor",),
    arguments=(),
    statuses="1 also if something that every command needs is missing",
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command; see `dflash doctor --help`."""
    cli.run(SUBCOMMAND, _doctor, argv)


def _doctor(command: cli.Command) -> int:
    sick = []
    print(_row("dflash", f"{__version__} in {pathlib.Path(__file__).parent}"))
    print(_row("configs", str(merging.package_configs())))
    print(_row("python", f"{platform.python_version()} in {sys.prefix}"))
    print(_row("system", f"{platform.system()} {platform.machine()}, {_cores()}, {_memory()}"))
    versions = {name: version(name) for name in REQUIRED}
    known = [f"{name} {number}" for name, number in versions.items() if number]
    print(*_wrapped("packages", known), sep="\n")
    missing = [name for name, number in versions.items() if not number]
    if missing:
        sick.append(f"missing packages: pip install {' '.join(missing)}")
    found, fine = devices()
    print(_row("devices", found))
    if not fine:
        sick.append("jax finds no device, see above")
    print("\nextras")
    print("\n".join(extras()))
    print("\ncaches")
    print("\n".join(caches()))
    given = [name for name in _VARIABLES if os.environ.get(name)]
    if given:
        print("\nenvironment")
        print("\n".join(f"  {name}={os.environ[name]}" for name in given))
    print()
    print("\n".join(f"problem: {line}" for line in sick) or "no problems found")
    return 1 if sick else 0


def version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except Exception:  # a broken installation has many ways to fail
        return None


def devices() -> tuple[str, bool]:
    """The devices that jax finds, or why there are none; and whether there are any.

    jax is asked in another process: a wrong flag in the environment aborts it, and a device that
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


def extras() -> Iterator[str]:
    """A line for each extra: what it is for, and what of it is missing."""
    for name, distributions, purpose in EXTRAS:
        missing = [one for one in distributions if version(one) is None]
        yield _row(f"  {name}", purpose)
        if missing:
            what = "missing" if len(missing) == len(distributions) else f"lacks {missing[0]}"
            yield _row("", f"{what}: pip install 'dflash[{name}]'")
        else:
            numbers = [f"{one} {version(one)}" for one in distributions]
            yield _row("", ", ".join(numbers))


def cache_directories() -> dict[str, pathlib.Path]:
    """Where this program and the hub's library keep what they have fetched or made."""
    from dflash.data import store
    from dflash.runs import compilation_cache

    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = pathlib.Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()
    return {
        "programs": compilation_cache.default_root(),
        "data sets": store.data_directory(None),
        "hub": pathlib.Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser(),
    }


def caches() -> Iterator[str]:
    """A line for each cache: where it is, and its size."""
    for name, directory in cache_directories().items():
        size = f"{size_bytes(directory) / 1e9:.2f} GB" if directory.is_dir() else "empty"
        yield _row(f"  {name}", f"{size}  {directory}")
    above = pathlib.Path.cwd()
    try:
        yield _row("  free disk", f"{shutil.disk_usage(above).free / 1e9:.0f} GB here")
    except OSError as error:
        yield _row("  free disk", f"unknown: {error.strerror}")


def size_bytes(directory: pathlib.Path) -> int:
    """Bytes of all files below a directory; links count as nothing, as does what is unreadable."""
    total, waiting = 0, [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(pathlib.Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total


def _row(name: str, text: str) -> str:
    return f"{name:<14}{text}".rstrip()


def _wrapped(name: str, words: Sequence[str], width: int = 64) -> Iterator[str]:
    """A row of several words, on as many lines as they need."""
    line = ""
    for word in words:
        if line and len(line) + len(word) + 2 > width:
            yield _row(name, f"{line},")
            name, line = "", ""
        line = f"{line}, {word}" if line else word
    yield _row(name, line)


def _cores() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} cores"


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return "memory unknown"
    return f"{total / 2**30:.0f} GiB of memory"


if __name__ == "__main__":
    main()
