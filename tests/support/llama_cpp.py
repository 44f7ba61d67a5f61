"""llama-cpp-python's source distribution, with vocabularies and chat templates of many models."""

import pathlib
import subprocess
import sys
import tarfile

import pytest

CACHE = pathlib.Path.home() / ".cache" / "dflash" / "tests"
COMMAND = ("pip", "download", "--quiet", "--no-binary=:all:", "--no-deps", "llama-cpp-python")


def files(folder: str, ending: str) -> dict[str, bytes]:
    """Returns the files of a folder of llama.cpp by name; pip downloads the archive once."""
    if not [*CACHE.glob("*.tar.gz")]:
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", *COMMAND, f"--dest={CACHE}"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"cannot be downloaded: {' '.join(COMMAND)}")
    (archive, *_) = CACHE.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        paths = {pathlib.PurePath(member.name): member for member in tar if member.isfile()}
        return {
            path.name: tar.extractfile(member).read()
            for path, member in paths.items()
            if path.match(f"vendor/llama.cpp/{folder}/*{ending}")
        }
