"""Two tiers of tests: those that always run, and those of slow.txt."""

import functools
import pathlib
import re
from collections.abc import Iterable

SLOW = pathlib.Path(__file__).parents[1] / "slow.txt"


def is_slow(nodeid: str) -> bool:
    """Whether a test, by its name in pytest, is one of slow.txt."""
    return any(_matches(line, nodeid) for line in _slow().get(_split(nodeid)[0], ()))


def stale(nodeids: Iterable[str]) -> list[str]:
    """Lines of slow.txt that name no test.

    Args:
      nodeids: of all tests.
    """
    names: dict[str, list[str]] = {}
    for one in nodeids:
        names.setdefault(_split(one)[0], []).append(one)
    lines = {line: name for name, lines in _slow().items() for line in lines}
    return [
        line
        for line, name in lines.items()
        if not any(_matches(line, one) for one in names.get(name, ()))
    ]


def _split(nodeid: str) -> tuple[str, str]:
    """The name of a test without the directory of all, and what its brackets hold."""
    name, _, cases = nodeid.removeprefix("tests/").partition("[")
    return name, cases.removesuffix("]")


def _matches(line: str, nodeid: str) -> bool:
    pattern = line.partition(" ")[2] or ".*"
    return re.fullmatch(pattern, _split(nodeid)[1]) is not None


@functools.cache
def _slow() -> dict[str, list[str]]:
    """Lines by the name of the test."""
    found: dict[str, list[str]] = {}
    for line in SLOW.read_text().splitlines():
        if line and not line.startswith("#"):
            found.setdefault(line.partition(" ")[0], []).append(line)
    return found
