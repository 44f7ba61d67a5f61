"""Plants one fault at a time into a copy of the package and reports which faults the tests find.

    python tools/mutants/run.py                      # all mutants, by the default tier
    python tools/mutants/run.py --slow -k verify     # some of them, with the slow tier as well

Each *.toml file in this folder lists mutants: a file below dflash/, the text to find in it (exactly
once), the text to put in its place, and the tests that should fail. A mutant is killed when pytest
reports a failure, and survives when all of its tests pass. The exit status is 1 if any survives.
"""

import argparse
import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_FAILED = 1  # pytest's exit status when a test fails


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault in one place of the package.

    Attributes:
      name: The list's name and the mutant's number in it.
      file: Path below dflash/.
      find: Text that occurs exactly once in the file.
      replace: Replacement of that text.
      tests: Paths and -k expressions for pytest, as on its command line.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    @property
    def path(self) -> pathlib.Path:
        """Path of the file in the package."""
        return pathlib.Path("dflash", self.file)

    def apply(self, source: str) -> str:
        """Returns the source with the fault.

        Raises:
          ValueError: The text to find does not occur exactly once in the source.
        """
        if (count := source.count(self.find)) != 1:
            raise ValueError(f"{self.name}: {self.file}: {self.find!r} occurs {count} times")
        return source.replace(self.find, self.replace)


def load(directory: pathlib.Path = HERE) -> list[Mutant]:
    """Returns all mutants of the lists in a directory."""
    mutants = []
    for path in sorted(directory.glob("*.toml")):
        for number, entry in enumerate(tomllib.loads(path.read_text())["mutant"]):
            fields = entry | {"tests": tuple(entry["tests"])}
            mutants.append(Mutant(name=f"{path.stem}:{number}", **fields))
    return mutants


def ignored(folder: str, names: list[str]) -> set[str]:
    """Returns the entries of a folder of the clone that a copy does not need."""
    beside = {".git", ".ci", "runs", ".venv"} if pathlib.Path(folder) == ROOT else set()
    return ({"__pycache__"} | beside) & set(names)


def kill(mutant: Mutant, copy: pathlib.Path, options: list[str]) -> bool:
    """Returns whether the mutant's tests fail in a copy of the repository that has the fault."""
    path = copy / mutant.path
    source = path.read_text()
    path.write_text(mutant.apply(source))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *options, *mutant.tests], cwd=copy, capture_output=True, check=False
        )
    finally:
        path.write_text(source)
    if done.returncode not in (0, _FAILED):
        raise RuntimeError(f"{mutant.name}: pytest exited {done.returncode}: {done.stdout[-500:]}")
    return done.returncode == _FAILED


def main() -> int:
    """Runs the chosen mutants; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="only mutants whose name or file contains this")
    parser.add_argument("--slow", action="store_true", help="run the slow tier too")
    arguments = parser.parse_args()
    mutants = [m for m in load() if arguments.k in m.name or arguments.k in m.file]
    survivors = []
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory, "copy")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutant in mutants:
            begin = time.monotonic()
            killed = kill(mutant, copy, ["--slow"] if arguments.slow else [])
            survivors += [] if killed else [mutant]
            word = "killed" if killed else "SURVIVED"
            print(f"{word:<9} {mutant.name:<16} {mutant.file} ({time.monotonic() - begin:.0f} s)")
            sys.stdout.flush()
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
