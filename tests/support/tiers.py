"""Three tiers of tests: the default one, and those of tiers/slow.txt and tiers/system.txt."""

import functools
import pathlib
import re
from collections.abc import Iterable

TIERS = ("slow", "system")
DIRECTORY = pathlib.Path(__file__).parents[1] / "tiers"


def tier_of(nodeid: str) -> str | None:
    """Returns the name of the tier that lists a test, or None for the default tier.

    Args:
      nodeid: The test's name in pytest.
    """
    name = _split(nodeid)[0]
    for tier in TIERS:
        listed = _lines(tier)
        lines = (*listed.get(name, ()), *listed.get(name.partition("::")[0], ()))
        if any(_matches(line, nodeid) for line in lines):
            return tier
    return None


def stale(nodeids: Iterable[str]) -> list[str]:
    """Returns the lines of the lists that match no test.

    Args:
      nodeids: The names of all tests.
    """
    names: dict[str, list[str]] = {}
    for nodeid in nodeids:
        name = _split(nodeid)[0]
        names.setdefault(name, []).append(nodeid)
        names.setdefault(name.partition("::")[0], []).append(nodeid)
    return [
        f"{tier}.txt: {line}"
        for tier in TIERS
        for name, lines in _lines(tier).items()
        for line in lines
        if not any(_matches(line, nodeid) for nodeid in names.get(name, ()))
    ]


def _split(nodeid: str) -> tuple[str, str]:
    """Splits a node id into the test's name below tests/ and the id of its case."""
    name, _, case = nodeid.removeprefix("tests/").partition("[")
    return name, case.removesuffix("]")


def _matches(line: str, nodeid: str) -> bool:
    pattern = line.partition(" ")[2] or ".*"
    return re.fullmatch(pattern, _split(nodeid)[1]) is not None


@functools.cache
def _lines(tier: str) -> dict[str, list[str]]:
    """Returns the lines of a tier's list, by the test or file that they name."""
    lines: dict[str, list[str]] = {}
    for line in (DIRECTORY / f"{tier}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            lines.setdefault(line.partition(" ")[0], []).append(line)
    return lines
