"""Peak rates of accelerators, for every bound, ridge point and roofline.

Source: the vendors' published peaks (dense bfloat16, no sparsity).
"""

import dataclasses
from collections.abc import Mapping

from dflash import errors
from dflash.config import registry


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak rates and memory of one chip.

    Attributes:
      name: Name in topologies, such as "v5p".
      tflops: Peak bfloat16 TFLOP/s.
      hbm_gb_per_s: Peak memory bandwidth in GB/s (10⁹ bytes).
      hbm_gb: Memory in the vendor's GB.
      devices: Number of jax devices per chip, which share its rates and memory equally.
      clock_ghz: Clock rate in GHz, to convert the compiler's cycles; None if unpublished.
    """

    name: str
    tflops: float
    hbm_gb_per_s: float
    hbm_gb: float
    devices: int = 1
    clock_ghz: float | None = None

    @property
    def ridge_rows(self) -> float:
        """Returns the number of rows at which a bfloat16 matmul takes as long as its weight reads.

        A two-byte weight takes two operations per row, so this is FLOP/s over bytes/s.
        """
        return self.tflops * 1e3 / self.hbm_gb_per_s

    def ideal_ms(self, flops: float, size_bytes: float) -> float:
        """Returns a lower bound on the time of a program on one device, in ms."""
        compute_ms = flops / (self.tflops / self.devices * 1e9)
        stream_ms = size_bytes / (self.hbm_gb_per_s / self.devices * 1e6)
        return max(compute_ms, stream_ms)


CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", 275, 1228, 32, clock_ghz=1.05),
        Chip("v5e", 197, 819, 16, clock_ghz=1.5),
        Chip("v5p", 459, 2765, 95, clock_ghz=1.75),
        Chip("v6e", 918, 1640, 32, clock_ghz=1.75),
        Chip("tpu7x", 2307, 7380, 192, devices=2),
        Chip("h100", 990, 3350, 80),
        Chip("h200", 990, 4800, 141),
    )
}

# Chip names by jax `device_kind`, in lower case.
_DEVICE_KINDS: Mapping[str, str] = {
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5": "v5p",
    "tpu v5p": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu7x": "tpu7x",
    "tpu v7x": "tpu7x",
}


def find(name: str) -> Chip:
    """Returns the chip of this name, ignoring case; raises ConfigError if there is none."""
    if name.lower() in CHIPS:
        return CHIPS[name.lower()]
    raise errors.ConfigError(f"unknown chip {name!r}{registry.suggest(name.lower(), CHIPS)}")


def of_device_kind(kind: str) -> Chip | None:
    """Returns the chip of a jax `device_kind` ("TPU v5 lite", "NVIDIA H200"); None if unknown."""
    lower = kind.lower()
    if lower in _DEVICE_KINDS:
        return CHIPS[_DEVICE_KINDS[lower]]
    return next((CHIPS[name] for name in ("h100", "h200") if name in lower), None)
