"""How busy other processes kept the processor while something was measured."""

import dataclasses
import os
import pathlib

_STAT = pathlib.Path("/proc/stat")


@dataclasses.dataclass(frozen=True)
class Load:
    """The processor over some time; None where the system does not say.

    Attributes:
      cores: of the machine.
      others_share: share of all cores' time that other processes took.
      load_average: processes that ran or waited, averaged over the last minute.
    """

    cores: int | None
    others_share: float | None
    load_average: float | None


class LoadMeter:
    """Measures the load from its making on."""

    def __init__(self):
        """Starts."""
        self._begin = _seconds()

    def read(self) -> Load:
        """The load since the start."""
        begin, end = self._begin, _seconds()
        others = None
        if begin is not None and end is not None:
            busy, own, whole = (after - before for before, after in zip(begin, end, strict=True))
            others = min(max(busy - own, 0.0) / whole, 1.0) if whole > 0 else None
        average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return Load(os.cpu_count(), others, average)


def _seconds() -> tuple[float, float, float] | None:
    """Seconds of all cores: busy, with this process and its children, and altogether.

    None where there is no /proc/stat.
    """
    try:
        line = _STAT.read_text(encoding="ascii").partition("\n")[0]
        ticks = [int(field) for field in line.split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, idle, waiting, *rest = ticks  # then interrupts, and time stolen by a host
    per_second = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + sum(rest)) / per_second
    return busy, sum(os.times()[:4]), busy + (idle + waiting) / per_second
