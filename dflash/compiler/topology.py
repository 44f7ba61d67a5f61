"""TPU topologies as the compiler knows them, and the mesh of a run over one of them."""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from dflash import errors
from dflash.parallel import chips, host, sharding
from dflash.parallel.sharding import Sharding

# Only the last of the hundred stages of every operation.
_DUMP = ("--xla_jf_dump_llo_text=true", "--xla_jf_dump_llo_pass_label_regex=.*final_.*bundle.*")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # No chip is acquired, so several compilers may run at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    **host.ENVIRONMENT,
}
EXAMPLES = "v5p:2x2x1, v5e:2x2, v6e:16x16 or v5p:1x1x1"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips that a program can be compiled for.

    Attributes:
      name: as given, such as "v5p:2x2x1".
      chip: what one of them can do; its `devices` are those that this topology shows for a chip.
      slices: copies of it, joined by the data center network.
      devices: of all slices.
    """

    name: str
    chip: chips.Chip
    slices: int
    devices: tuple[jax.Device, ...]

    @property
    def num_chips(self) -> int:
        """Of all slices."""
        return len(self.devices) // self.chip.devices


def prepare_environment(schedules: str | None = None) -> None:
    """Sets the variables that the TPU compiler needs on a host without TPUs, before it is loaded.

    Args:
      schedules: directory that it is to write the final schedule of everything to, or None.
    Raises:
      UserError: the compiler is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise errors.ConfigError(
            "the TPU compiler is not installed: pip install 'dflash[tpu]' (Linux on x86-64; no TPU "
            "is needed)"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if schedules is not None:
        options = (os.environ.get("LIBTPU_INIT_ARGS", ""), f"--xla_jf_dump_to={schedules}", *_DUMP)
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(options).strip()


def find(name: str | None, slices: int = 1) -> Topology:
    """Describes a topology.

    Args:
      name: chip and shape, such as "v5p:2x2x1".
      slices: how many of them.
    Raises:
      ConfigError: no such chip, or no such shape of it.
    """
    if name is None:
        raise errors.ConfigError(f"tpu.topology: required, such as {EXAMPLES}")
    generation, _, shape = name.partition(":")
    try:
        chip = chips.find(generation)
        dims = [int(dim) for dim in shape.split("x")]
    except (errors.ConfigError, ValueError) as error:
        reason = error if isinstance(error, errors.ConfigError) else "expected chip:AxB or AxBxC"
        raise errors.ConfigError(f"tpu.topology: {name}: {reason}, such as {EXAMPLES}") from None
    count = math.prod(dims)
    # A host of such a machine has four chips unless told otherwise; a single chip has to be told.
    options = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
    if slices > 1:
        options["num_slices"] = slices
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise errors.ConfigError(f"tpu.topology: {name}: no such machine: {reason}") from None
    devices = tuple(found.devices)
    chip = dataclasses.replace(chip, devices=len(devices) // (count * slices))
    return Topology(name, chip, slices, devices)


def make_sharding(
    topology: Topology, axis_sizes: Mapping[str, int], rules: Mapping[str, Sequence[str]]
) -> Sharding:
    """The mesh of a run over a topology.

    Args:
      topology: all of its devices are used.
      axis_sizes: devices along each mesh axis.
      rules: logical axis -> mesh axes.
    Raises:
      ConfigError: the mesh has another number of devices, or does not split over the slices.
    """
    described = sharding.make_sharding(axis_sizes, rules, abstract=True)
    shape = tuple(axis_sizes.get(axis, 1) for axis in sharding.MESH_AXES)
    wanted, present = math.prod(shape), len(topology.devices)
    if wanted != present:
        axes = " × ".join(
            f"{axis} {size}" for axis, size in zip(sharding.MESH_AXES, shape, strict=True)
        )
        raise errors.ConfigError(
            f"mesh: {axes} = {wanted} devices, but {topology.slices} × {topology.name} "
            f"has {present}; set the axes of the mesh to use them all"
        )
    mesh = Mesh(
        sharding.arrange(topology.devices, shape),
        sharding.MESH_AXES,
        axis_types=(AxisType.Auto,) * len(sharding.MESH_AXES),
    )
    return dataclasses.replace(described, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class RooflineRates:
    """Peak rates of a device as the compiler's own roofline has them."""

    flops_per_s: float
    bytes_per_s: float


def compiler_rates(topology: Topology) -> RooflineRates:
    """Asks the compiler by two products, one limited by arithmetic and one by memory."""
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def cost(rows: int, inner: int, columns: int):
        shapes = [
            jax.ShapeDtypeStruct(shape, "bfloat16", sharding=device)
            for shape in ((rows, inner), (inner, columns))
        ]
        analysis = jax.jit(lambda a, b: a @ b).lower(*shapes).compile().cost_analysis()
        return analysis, analysis["optimal_seconds"]

    square, square_s = cost(8192, 8192, 8192)
    thin, thin_s = cost(16, 4096, 65536)
    return RooflineRates(square["flops"] / square_s, thin["bytes accessed"] / thin_s)
