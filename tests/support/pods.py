"""Devices of TPU pods, as far as meshes are made of them: places, processes, slices."""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device; attributes as jax names them."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    device_kind: str
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"


def chips(
    kind: str, shape: tuple[int, int, int], host: tuple[int, int, int], slices: int = 1
) -> list[Chip]:
    """The devices of a pod, in jax's order: x first.

    Args:
      kind: as jax names it, such as "TPU v5 lite".
      shape: chips of a slice along x, y and z.
      host: of them, those of one process.
      slices: number of slices.
    """
    found = []
    hosts = [size // one for size, one in zip(shape, host, strict=True)]
    for number in range(slices):
        for z, y, x in itertools.product(*map(range, reversed(shape))):
            i, j, k = (at // one for at, one in zip((x, y, z), host, strict=True))
            process = i + hosts[0] * (j + hosts[1] * (k + hosts[2] * number))
            found.append(Chip(len(found), process, (x, y, z), kind, number))
    return found
