"""Parser of the static schedule of a Pallas kernel: its bundles by loop depth and unit.

A bundle is the set of instructions that the core issues in one cycle. The number of bundles in a
loop times its trip count is a lower bound on its cycles, because a static schedule has no stalls.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

# An address, an optional mark of a loop's header or body, and one ">" per enclosing loop.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*((?:>\s?)*)\s*\{(.?)")
# The compiler has about a hundred passes per operation; dump the output of the last one only.
_DUMP = ("--xla_jf_dump_llo_text=true", "--xla_jf_dump_llo_pass_label_regex=.*final_.*bundle.*")
_MXU, _FILL, _SPILL = "MXU", "VLOAD:FILL", "VSTORE:SPILL"


@dataclasses.dataclass(frozen=True)
class Section:
    """Consecutive bundles at the same loop depth.

    Attributes:
      depth: Number of enclosing loops.
      bundles: Number of bundles.
      used: Slots used, by unit, such as "MXU", "VALU" or "VSTORE:SPILL", summed over the bundles.
    """

    depth: int
    bundles: int
    used: dict[str, int]

    @property
    def spills(self) -> int:
        """Returns the number of slots that spill registers to memory or reload them."""
        return self.used.get(_FILL, 0) + self.used.get(_SPILL, 0)

    @property
    def matmuls(self) -> int:
        """Returns the number of matrix unit slots in use."""
        return self.used.get(_MXU, 0)


def dump_to(directory: str) -> None:
    """Makes the compiler dump final schedules to a directory; call it before jax loads it."""
    options = (os.environ.get("LIBTPU_INIT_ARGS", ""), f"--xla_jf_dump_to={directory}", *_DUMP)
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(options).strip()


def sections(schedule: str, utilization: str) -> list[Section]:
    """Splits a schedule into sections wherever the loop depth changes.

    Args:
      schedule: Text of `…final_bundles.txt`.
      utilization: Text of `…final_hlo-static-per-bundle-utilization.txt`, one line per bundle.
    Raises:
      ValueError: The two texts have different numbers of bundles.
    """
    depths = _depths(schedule)
    names, rows = _utilization(utilization)
    if len(depths) != len(rows):
        raise ValueError(
            f"the schedule has {len(depths)} bundles, but the utilization has {len(rows)}"
        )
    result: list[Section] = []
    start = 0
    for end in range(1, len(depths) + 1):
        if end == len(depths) or depths[end] != depths[start]:
            used = [sum(column) for column in zip(*rows[start:end], strict=True)]
            section = Section(depths[start], end - start, dict(zip(names, used, strict=True)))
            result.append(section)
            start = end
    return result


def inner_loop(schedule: Sequence[Section]) -> Section:
    """Returns the longest of the deepest sections.

    Only sections that use a matrix unit count, unless no section does.
    """
    candidates = [section for section in schedule if section.matmuls] or list(schedule)
    deepest = max(section.depth for section in candidates)
    return max(
        (section for section in candidates if section.depth == deepest),
        key=lambda section: section.bundles,
    )


def read_schedules(directory: pathlib.Path, kernels: Iterable[str]) -> dict[str, list[Section]]:
    """Reads the schedules of kernels that the compiler has dumped.

    Args:
      directory: Directory that was passed to `dump_to`.
      kernels: Names of the kernels' calls, without the numbers that the compiler appends.
    Returns:
      Sections of the first schedule of each name, by kernel; kernels without a schedule are left
      out.
    """
    schedules = {}
    for name in kernels:
        pattern = re.compile(rf"\d+-{re.escape(name)}[.\d]*-\d+-final_bundles\.txt")
        files = sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))
        if not files:
            continue
        stem = files[0].name.rsplit("-", 2)[0]
        use = next(directory.glob(f"{stem}-*-final_hlo-static-per-bundle-utilization.txt"))
        schedules[name] = sections(files[0].read_text(), use.read_text())
    return schedules


def lines(schedules: dict[str, list[Section]]) -> list[str]:
    """Formats the schedules as lines of text; empty without kernels."""
    if not schedules:
        return []
    text = [
        "",
        "static schedules of the Pallas kernels, in bundles (one cycle each without stalls)",
    ]
    for name, schedule in schedules.items():
        inner = inner_loop(schedule)
        text.append(
            f"  {name}: {sum(section.bundles for section in schedule)} bundles; inner loop at "
            f"depth {inner.depth}: {inner.bundles} bundles, {inner.matmuls} matrix unit slots, "
            f"{inner.spills} spills and fills"
        )
    return text


def _depths(schedule: str) -> list[int]:
    depths: list[int] = []
    for line in schedule.splitlines():
        if match := _BUNDLE.match(line):
            marks, first = match.groups()
            # The compiler omits the marks of an empty bundle.
            inherits = first == "}" and depths
            depths.append(depths[-1] if inherits else marks.count(">"))
    return depths


def _utilization(text: str) -> tuple[list[str], list[list[int]]]:
    head, _, body = text.partition("== UTILIZATION:")
    names = next(line for line in head.splitlines() if line.startswith(_MXU)).split(", ")
    return names, [[int(count) for count in line.split()] for line in body.strip().splitlines()]
