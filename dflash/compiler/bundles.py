"""Reads the static schedule of a Pallas kernel: its bundles by loop depth, and what fills them.

A bundle is what the core issues in one cycle, so the bundles of a loop times its turns are a lower
bound of its cycles: nothing stalls in a static schedule.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Sequence

# An address, perhaps the mark of a loop's header or body, and one ">" per loop around.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*((?:>\s?)*)\s*\{(.?)")
_MXU, _FILL, _SPILL = "MXU", "VLOAD:FILL", "VSTORE:SPILL"


@dataclasses.dataclass(frozen=True)
class Section:
    """Bundles in a row, at one depth of loops.

    Attributes:
      depth: loops around it.
      bundles: how many.
      used: slots by unit, such as "MXU", "VALU" or "VSTORE:SPILL", summed over the bundles.
    """

    depth: int
    bundles: int
    used: dict[str, int]

    @property
    def spills(self) -> int:
        """Slots that spill registers to memory or fill them again."""
        return self.used.get(_FILL, 0) + self.used.get(_SPILL, 0)

    @property
    def matmuls(self) -> int:
        """Slots of the matrix units."""
        return self.used.get(_MXU, 0)


def sections(schedule: str, utilization: str) -> list[Section]:
    """Cuts a schedule where the depth of loops changes.

    Args:
      schedule: text of `…final_bundles.txt`.
      utilization: text of `…final_hlo-static-per-bundle-utilization.txt`, a line per bundle.
    Raises:
      ValueError: the two belong to different programs.
    """
    depths = _depths(schedule)
    names, rows = _utilization(utilization)
    if len(depths) != len(rows):
        raise ValueError(f"{len(depths)} bundles, but the use of {len(rows)}")
    found: list[Section] = []
    start = 0
    for end in range(1, len(depths) + 1):
        if end == len(depths) or depths[end] != depths[start]:
            used = [sum(column) for column in zip(*rows[start:end], strict=True)]
            section = Section(depths[start], end - start, dict(zip(names, used, strict=True)))
            found.append(section)
            start = end
    return found


def inner_loop(found: Sequence[Section]) -> Section:
    """The longest section at the greatest depth that uses a matrix unit; without, of all."""
    working = [section for section in found if section.matmuls] or list(found)
    deepest = max(section.depth for section in working)
    return max(
        (section for section in working if section.depth == deepest),
        key=lambda section: section.bundles,
    )


def read_schedules(directory: pathlib.Path, kernels: Iterable[str]) -> dict[str, list[Section]]:
    """Reads the schedules of kernels from where the compiler wrote them.

    Args:
      directory: see `topology.prepare_environment`.
      kernels: names of their calls, without the numbers that the compiler adds.
    Returns:
      By kernel, the sections of the first schedule of that name; those without one are left out.
    """
    found = {}
    for name in kernels:
        pattern = re.compile(rf"\d+-{re.escape(name)}[.\d]*-\d+-final_bundles\.txt")
        files = sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))
        if not files:
            continue
        stem = files[0].name.rsplit("-", 2)[0]
        use = next(directory.glob(f"{stem}-*-final_hlo-static-per-bundle-utilization.txt"))
        found[name] = sections(files[0].read_text(), use.read_text())
    return found


def lines(found: dict[str, list[Section]]) -> list[str]:
    """The schedules as text; empty without kernels."""
    if not found:
        return []
    text = ["", "static schedules of our kernels, in bundles (a cycle each, if nothing stalls)"]
    for name, parts in found.items():
        inner = inner_loop(parts)
        text.append(
            f"  {name}: {sum(part.bundles for part in parts)} in all; inner loop, at depth "
            f"{inner.depth}: {inner.bundles}, with {inner.matmuls} of the matrix units' slots and "
            f"{inner.spills} spills and fills"
        )
    return text


def _depths(schedule: str) -> list[int]:
    depths: list[int] = []
    for line in schedule.splitlines():
        if match := _BUNDLE.match(line):
            marks, first = match.groups()
            # An empty bundle is written without its marks.
            inherits = first == "}" and depths
            depths.append(depths[-1] if inherits else marks.count(">"))
    return depths


def _utilization(text: str) -> tuple[list[str], list[list[int]]]:
    head, _, body = text.partition("== UTILIZATION:")
    names = next(line for line in head.splitlines() if line.startswith(_MXU)).split(", ")
    return names, [[int(count) for count in line.split()] for line in body.strip().splitlines()]
