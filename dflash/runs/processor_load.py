"""Load of the processor by other processes during a measurement."""

import dataclasses
import os
import pathlib

MAX_OTHERS_SHARE = 0.1
_STAT = pathlib.Path("/proc/stat")


@dataclasses.dataclass(frozen=True)
class Load:
    """Load of the processor over some time; None where the system does not report it."""

    cores: int | None
    others_share: float | None


def warning(others_share: float | None) -> str | None:
    """Returns why times measured under a load are not trustworthy; None if they are, or unknown.

    Args:
      others_share: Fraction of all cores' time that other processes used; None if unknown.
    """
    if others_share is None or others_share <= MAX_OTHERS_SHARE:
        return None
    return f"other processes took {100 * others_share:.0f} % of the processor during the run"


class LoadMeter:
    """Meter of the load since its construction."""

    def __init__(self):
        self._begin = _seconds()

    def read(self) -> Load:
        """Returns the load since the start."""
        begin, end = self._begin, _seconds()
        others_share = None
        if begin is not None and end is not None:
            busy, own_time, total = (
                after - before for before, after in zip(begin, end, strict=True)
            )
            others_share = min(max(busy - own_time, 0.0) / total, 1.0) if total > 0 else None
        return Load(os.cpu_count(), others_share)


def _seconds() -> tuple[float, float, float] | None:
    """Returns three sums over all cores, in seconds; None without /proc/stat.

    They are busy time, the time of this process and its children, and total time.
    """
    try:
        line = _STAT.read_text(encoding="ascii").partition("\n")[0]
        ticks = [int(field) for field in line.split()[1:9]]
    except (OSError, ValueError):
        return None
    # The remaining fields are interrupts, and time that a hypervisor gave to other guests.
    user, nice, system, idle, waiting, *rest = ticks
    per_second = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + sum(rest)) / per_second
    return busy, sum(os.times()[:4]), busy + (idle + waiting) / per_second
