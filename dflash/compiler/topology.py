"""TPU topologies of the compiler, and the mesh of a run over a topology."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from dflash import errors
from dflash.config.tpu_schema import CompileDecode, CompileTrain
from dflash.parallel import chips, host, sharding
from dflash.parallel.sharding import Sharding
from dflash.version import install_command

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # No chip is acquired, so several compilers may run at the same time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    **host.ENVIRONMENT,
}
EXAMPLES = "v5p:2x2x1, v5p-8, v5e:2x2 or v6e:16x16"


@dataclasses.dataclass(frozen=True)
class Topology:
    """TPU chips that a program can be compiled for.

    Attributes:
      name: Name, such as "v5p:2x2x1".
      chip: Peak rates of one chip, with the number of devices per chip in this topology.
      slices: Number of slices, connected by the data center network.
    """

    name: str
    chip: chips.Chip
    slices: int
    devices: tuple[jax.Device, ...]

    @property
    def num_chips(self) -> int:
        """Returns the number of chips in all slices."""
        return len(self.devices) // self.chip.devices


def prepare_environment() -> None:
    """Sets the environment variables that the TPU compiler needs on a host without TPUs.

    Call it before jax loads the compiler.

    Raises:
      UserError: The compiler is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise errors.ConfigError(
            f"the TPU compiler is not installed: {install_command('tpu')} (Linux on x86-64; no TPU "
            "is needed)"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def shape_of_type(name: str) -> str:
    """Returns the topology of a Cloud TPU accelerator type; other names are returned unchanged.

    Types such as v5p-8 count cores, of which v4 and v5p have two per chip; v5litepod-8 and v6e-8
    count chips.

    Source: the tables of configurations in Cloud TPU's documentation.
    """
    match = re.fullmatch(r"(v4|v5p|v5e|v5litepod|v6e)-(\d+)", name)
    if not match:
        return name
    generation, count = match[1].replace("v5litepod", "v5e"), int(match[2])
    cores, dimensions = (2, 3) if generation in ("v4", "v5p") else (1, 2)
    doublings = (count // cores).bit_length() - 1
    if count != cores << max(doublings, 0):
        return name
    if (dimensions, doublings) == (3, 2):
        return f"{generation}:2x2x1"
    exponents = ((doublings + place) // dimensions for place in range(dimensions))
    return f"{generation}:{'x'.join(str(1 << exponent) for exponent in exponents)}"


def find(name: str | None, slices: int = 1) -> Topology:
    """Returns the topology with this name and number of slices.

    Args:
      name: Chip and shape, such as "v5p:2x2x1", or an accelerator type, such as "v5p-8".
    Raises:
      ConfigError: The chip is unknown, or the compiler has no such shape.
    """
    if name is None:
        raise errors.ConfigError(f"tpu.topology: required, such as {EXAMPLES}")
    name = shape_of_type(name)
    generation, _, shape = name.partition(":")
    try:
        chip = chips.find(generation)
        dims = [int(dim) for dim in shape.split("x")]
    except (errors.ConfigError, ValueError) as error:
        reason = error if isinstance(error, errors.ConfigError) else "expected chip:AxB or AxBxC"
        raise errors.ConfigError(f"tpu.topology: {name}: {reason}, such as {EXAMPLES}") from None
    count = math.prod(dims)
    # By default the compiler assumes hosts of four chips, so a single chip needs its bounds.
    options = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
    if slices > 1:
        options["num_slices"] = slices
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise errors.ConfigError(f"tpu.topology: {name}: no such topology: {reason}") from None
    devices = tuple(description.devices)
    chip = dataclasses.replace(chip, devices=len(devices) // (count * slices))
    return Topology(name, chip, slices, devices)


def make_sharding(
    topology: Topology,
    axis_sizes: Mapping[str, int],
    rules: Mapping[str, Sequence[str]],
    *,
    exact: bool = False,
) -> Sharding:
    """Returns the sharding of a run whose mesh covers a topology.

    Args:
      axis_sizes: Number of devices along each mesh axis.
      rules: Mesh axes by logical axis.
      exact: See `Sharding`.
    Raises:
      ConfigError: The mesh has a different number of devices, or does not divide over the slices.
    """
    abstract = sharding.make_sharding(axis_sizes, rules, abstract=True, exact=exact)
    shape = tuple(axis_sizes.get(axis, 1) for axis in sharding.MESH_AXES)
    mesh_size, num_devices = math.prod(shape), len(topology.devices)
    if mesh_size != num_devices:
        axes = " × ".join(
            f"{axis} {size}" for axis, size in zip(sharding.MESH_AXES, shape, strict=True)
        )
        raise errors.ConfigError(
            f"mesh: {axes} = {mesh_size} devices, but {topology.slices} × {topology.name} "
            f"has {num_devices}; set the mesh axes so "
            f"that their product is {num_devices}"
        )
    mesh = Mesh(
        sharding.arrange(topology.devices, shape),
        sharding.MESH_AXES,
        axis_types=(AxisType.Auto,) * len(sharding.MESH_AXES),
    )
    return dataclasses.replace(abstract, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class RooflineRates:
    """Peak rates of a device in the compiler's own roofline model."""

    flops_per_s: float
    bytes_per_s: float


def compiler_rates(topology: Topology) -> RooflineRates:
    """Derives the compiler's rates from two matmuls, one compute-bound and one memory-bound."""
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


@dataclasses.dataclass(frozen=True)
class TpuMachine:
    """TPU topology that a run is compiled for."""

    topology: Topology
    sharding: Sharding
    rates: RooflineRates


def find_machine(config: CompileDecode | CompileTrain) -> TpuMachine:
    """Returns the topology of a run with sharding and rates; raises ConfigError if none fits."""
    topology = find(config.tpu.topology, config.tpu.slices)
    axis_sizes = dataclasses.asdict(config.mesh)
    exact = isinstance(config, CompileDecode) and config.decode.exact
    return TpuMachine(
        topology,
        make_sharding(topology, axis_sizes, config.sharding_rules, exact=exact),
        compiler_rates(topology),
    )
