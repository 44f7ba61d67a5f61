"""Reports what this installation has: dflash doctor."""

import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence

from dflash.cli import installation
from dflash.cli import subcommand as cli
from dflash.config import merging
from dflash.version import DISTRIBUTION, __version__, install_command

SUBCOMMAND = cli.Subcommand(
    "doctor",
    "Reports what this installation has: versions, devices, missing extras and the purpose of "
    "each, caches and their sizes. It changes nothing. Paste its output into bug reports.",
    examples=("dflash doctor",),
    arguments=(),
    statuses="1 also if something that every command needs is missing",
)


def _doctor(command: cli.Command) -> int:
    problems = []
    print(_row("dflash", f"{__version__} in {pathlib.Path(__file__).parent}"))
    print(_row("configs", str(merging.package_configs())))
    print(_row("python", f"{platform.python_version()} in {sys.prefix}"))
    system = f"{platform.system()} {platform.machine()}"
    print(_row("system", f"{system}, {installation.cores()}, {installation.memory()}"))
    versions = {name: installation.version(name) for name in installation.REQUIRED}
    present = [f"{name} {number}" for name, number in versions.items() if number]
    print(*_wrapped("packages", present), sep="\n")
    missing = [name for name, number in versions.items() if not number]
    if missing:
        problems.append(f"missing packages: pip install {' '.join(missing)}")
    problems += [_clash_advice(name) for name in installation.clashing_distributions()]
    devices, has_device = installation.devices()
    print(_row("devices", devices))
    if not has_device:
        problems.append("jax finds no device, see above")
    print(_row("cpu kernels", installation.cpu_kernels()))
    print("\nextras")
    print("\n".join(_extras()))
    print("\ncaches")
    print("\n".join(_caches()))
    variables = [name for name in installation.VARIABLES if os.environ.get(name)]
    if variables:
        print("\nenvironment")
        print("\n".join(f"  {name}={os.environ[name]}" for name in variables))
    print()
    print("\n".join(f"problem: {line}" for line in problems) or "no problems found")
    return 1 if problems else 0


def _clash_advice(distribution: str) -> str:
    """Returns the problem and remedy of a distribution that installs over this one."""
    return (
        f"the distribution {distribution} installs into the same folder and replaces files of "
        f"{DISTRIBUTION}: pip uninstall {distribution} {DISTRIBUTION}, then install {DISTRIBUTION} "
        "again (docs/index.md)"
    )


def _extras() -> Iterator[str]:
    """Yields the lines of each extra: its purpose, and its versions or what is missing."""
    for extra, distributions, purpose in installation.EXTRAS:
        versions = {name: installation.version(name) for name in distributions}
        missing = [name for name, number in versions.items() if number is None]
        yield _row(f"  {extra}", purpose)
        if missing:
            what = "missing" if len(missing) == len(distributions) else f"lacks {missing[0]}"
            yield _row("", f"{what}: {install_command(extra)}")
        else:
            yield _row("", ", ".join(f"{name} {number}" for name, number in versions.items()))


def _caches() -> Iterator[str]:
    """Yields a line for each cache, with its size and path, and one for the free disk space."""
    for name, directory in installation.cache_directories().items():
        size = "empty"
        if directory.is_dir():
            size = f"{installation.size_bytes(directory) / 1e9:.2f} GB"
        yield _row(f"  {name}", f"{size}  {directory}")
    try:
        free = f"{shutil.disk_usage(pathlib.Path.cwd()).free / 1e9:.0f} GB here"
    except OSError as error:
        free = f"unknown: {error.strerror}"
    yield _row("  free disk", free)


def _row(name: str, text: str) -> str:
    return f"{name:<14}{text}".rstrip()


def _wrapped(name: str, items: Sequence[str]) -> Iterator[str]:
    """Yields a row of several items, on as many lines as they need."""
    line = ""
    for item in items:
        if line and len(line) + len(item) > 62:
            yield _row(name, f"{line},")
            name, line = "", ""
        line = f"{line}, {item}" if line else item
    yield _row(name, line)


main = cli.entry_point(SUBCOMMAND, _doctor)

if __name__ == "__main__":
    main()
