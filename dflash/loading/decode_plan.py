"""Memory and programs of a run, computed from shapes alone for `--dry_run`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from dflash.inference.engine import Engine
from dflash.parallel import parameters


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of one kind of array, in total and on each device."""

    total_bytes: int
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a decode run before it starts.

    Attributes:
      drafter_parameters: Number of weights of the drafter; 0 if the strategy has none.
      memory: Bytes by kind of array, on the devices of the mesh.
      drafter_devices: Number of devices that hold only the drafter.
      drafter_memory: Bytes by kind of array, on these devices.
      programs: Names of the programs to be compiled.
    """

    mesh: dict[str, int]
    target_parameters: int
    drafter_parameters: int
    memory: dict[str, Share]
    drafter_devices: int
    drafter_memory: dict[str, Share]
    programs: tuple[str, ...]

    def lines(self) -> list[str]:
        """Returns the plan as lines of text."""
        beside = f", and {self.drafter_devices} for the drafter" if self.drafter_devices else ""
        lines = [
            mesh_line(self.mesh) + beside,
            f"parameters   target {self.target_parameters:,}, drafter {self.drafter_parameters:,}",
            *_table("memory", self.memory),
        ]
        if self.drafter_devices:
            lines += _table("the drafter's devices", self.drafter_memory)
        lines.append(f"programs     {len(self.programs)} to compile: {', '.join(self.programs)}")
        return lines


def make_plan(
    engine: Engine, target: nnx.Module, drafter: nnx.Module, programs: Sequence[tuple]
) -> Plan:
    """Returns the plan of a run by an engine, whose models may be abstract.

    Args:
      programs: Names of the programs to be compiled; see `Engine.program_names`.
    """
    state = engine.abstract_state()
    cache = state.cache
    recurrent = {"recurrent state": measure(cache.states)} if cache.states else {}
    of_drafter = {
        "drafter weights": measure(nnx.state(drafter, nnx.Param)),
        "drafter state": measure((state.drafter, state.choice)),
    }
    drafter_devices, arrays = engine.beside()
    beside = {kind: measure(each) for kind, each in arrays.items()}
    if drafter_devices:
        of_drafter = {}
    return Plan(
        mesh=dict(engine.sharding.mesh.shape),
        target_parameters=parameters.count(target),
        drafter_parameters=parameters.count(drafter),
        memory={
            "target weights": measure(nnx.state(target, nnx.Param)),
            "target cache": measure((cache.pools, cache.page_table)),
            **recurrent,
            **of_drafter,
        },
        drafter_devices=drafter_devices,
        drafter_memory=beside,
        programs=tuple(" ".join(map(str, name)) for name in programs),
    )


def mesh_line(mesh: Mapping[str, int]) -> str:
    """Returns the mesh of a run as a line of its plan."""
    devices = math.prod(mesh.values())
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    return f"mesh         {axes} = {devices} device{'s' if devices > 1 else ''}"


def measure(tree: Any) -> Share:
    """Returns the bytes of all arrays of a pytree, abstract or not."""
    total = device = 0
    for leaf in jax.tree.leaves(tree):
        shard = math.prod(leaf.sharding.shard_shape(leaf.shape))
        total += leaf.size * leaf.dtype.itemsize
        device += shard * leaf.dtype.itemsize
    return Share(total, device)


def device_bytes(tree: Any) -> int:
    """Returns the bytes on each device of all arrays of a pytree, abstract or not."""
    return measure(tree).device_bytes


def _table(title: str, memory: Mapping[str, Share]) -> list[str]:
    """Returns the lines of a table of bytes by kind of array, with their sum."""
    everything = Share(
        sum(share.total_bytes for share in memory.values()),
        sum(share.device_bytes for share in memory.values()),
    )
    lines = [f"{title:<24}{'in all':>12}{'per device':>14}"]
    for kind, share in (*memory.items(), ("sum", everything)):
        sizes = f"{readable(share.total_bytes):>12}{readable(share.device_bytes):>14}"
        lines.append(f"  {kind:<22}{sizes}")
    return lines


def readable(size_bytes: int) -> str:
    """Returns a number of bytes as text, such as 1.5 GiB."""
    if size_bytes < 2**20:
        return f"{size_bytes / 2**10:.1f} KiB"
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"
