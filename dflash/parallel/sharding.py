"""Logical axes -> mesh axes: where every parameter, cache and activation lives.

Code names the axes of an array by what they mean ("heads", "vocab", "batch"); a table of rules says
over which mesh axes each is split. An axis that does not fit is an error up front, never silent
replication.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dflash import errors
from dflash.config import registry
from dflash.config.schema import MeshConfig

MESH_AXES = tuple(field.name for field in dataclasses.fields(MeshConfig))


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh and the rules that map logical axes onto it. Hashable, so modules may hold it."""

    mesh: Mesh | AbstractMesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the mesh, of every process."""
        return tuple(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        """Platform of the devices, such as "tpu"; "unknown" for an abstract mesh."""
        return "unknown" if isinstance(self.mesh, AbstractMesh) else self.devices[0].platform

    def axes(self, name: str | None) -> tuple[str, ...]:
        """Mesh axes of more than one device that logical axis `name` is split over."""
        if name is None:
            return ()
        return tuple(axis for axis in dict(self.rules)[name] if self.mesh.shape[axis] > 1)

    def size(self, name: str | None) -> int:
        """Number of pieces that logical axis `name` is split into."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(name))

    def spec(self, *names: str | None) -> PartitionSpec:
        """PartitionSpec of an array whose dimensions carry these logical names.

        Raises:
          ConfigError: an unknown name, or two dimensions that want the same mesh axis.
        """
        used: dict[str, str] = {}
        entries = []
        for name in names:
            if name is not None and name not in dict(self.rules):
                near = registry.suggest(name, dict(self.rules))
                raise errors.ConfigError(f"sharding_rules: no rule for axis {name!r}{near}")
            for axis in self.axes(name):
                if axis in used:
                    raise errors.ConfigError(
                        f"sharding_rules: {used[axis]!r} and {name!r} are dimensions of one array "
                        f"and both want mesh axis {axis!r}; give them different axes"
                    )
                used[axis] = name
            axes = self.axes(name)
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        return PartitionSpec(*entries)

    def named(self, shape: Sequence[int], names: Sequence[str | None]) -> NamedSharding:
        """NamedSharding of an array of this shape.

        Raises:
          ConfigError: a dimension does not divide evenly over its mesh axes.
        """
        spec = self.spec(*names)
        for length, name in zip(shape, names, strict=True):
            if length % self.size(name):
                raise errors.ConfigError(
                    f"mesh: axis {name!r} of length {length} does not divide over "
                    f"{self.size(name)} devices ({' × '.join(self.axes(name))})"
                )
        return NamedSharding(self.mesh, spec)

    def abstract(self, shape, names, dtype) -> jax.ShapeDtypeStruct:
        """An abstract array: shape, dtype and sharding, without memory."""
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.named(shape, names))

    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, array: jax.Array, *names: str | None) -> jax.Array:
        """Pins the layout of an activation inside a jitted program."""
        if self.mesh.size == 1:
            return array
        return jax.lax.with_sharding_constraint(array, self.named(array.shape, names))

    def map(self, function, in_names, out_names):
        """`function` run once per device on its own shards (jax.shard_map), or as it is on one.

        Args:
          function: takes and returns arrays, or pytrees of arrays of one layout.
          in_names: per argument, the logical names of its dimensions.
          out_names: per result, likewise.
        """
        if self.mesh.size == 1:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(self.spec(*names) for names in in_names),
            out_specs=tuple(self.spec(*names) for names in out_names),
            check_vma=False,
        )

    def index(self, name: str) -> jax.Array | int:
        """Inside `map`: which piece of logical axis `name` this device holds."""
        return jax.lax.axis_index(self.axes(name)) if self.axes(name) else 0


def make_sharding(
    axis_sizes: Mapping[str, int], rules: Mapping[str, Sequence[str]], *, abstract: bool = False
) -> Sharding:
    """Builds the mesh that a config asks for.

    Args:
      axis_sizes: devices along each of `MESH_AXES`; 1 where left out.
      rules: logical axis -> mesh axes.
      abstract: describe the mesh without touching a device (`--dry_run`).
    Raises:
      ConfigError: rules name an unknown mesh axis, or more devices are wanted than there are.
    """
    for name, axes in rules.items():
        for axis in axes:
            if axis not in MESH_AXES:
                near = registry.suggest(axis, MESH_AXES)
                raise errors.ConfigError(f"sharding_rules.{name}: unknown mesh axis {axis!r}{near}")
    batch, pages = rules.get("batch"), rules.get("pages")
    if pages is not None and tuple(pages) != tuple(batch or ()):
        # Page tables index a device's own pages: a sequence and its pages must live together.
        raise errors.ConfigError(
            f"sharding_rules: batch {list(batch or ())} and pages {list(pages)} differ; "
            "give both the same axes"
        )
    frozen = tuple(sorted((name, tuple(axes)) for name, axes in rules.items()))
    shape = tuple(axis_sizes.get(axis, 1) for axis in MESH_AXES)
    # Explicit axes, jax's default, would make every layer spell out the sharding of its outputs.
    types = (AxisType.Auto,) * len(MESH_AXES)
    if abstract:
        return Sharding(AbstractMesh(shape, MESH_AXES, axis_types=types), frozen)
    wanted, present = math.prod(shape), jax.device_count()
    several = jax.process_count() > 1
    if wanted > present or (several and wanted != present):
        rest = ", all of which several processes must use" if several else ""
        raise errors.ConfigError(
            f"mesh: {' × '.join(MESH_AXES)} = {' × '.join(map(str, shape))} = {wanted} devices, "
            f"but {present} are present{rest}"
        )
    if wanted == present:
        devices = arrange(jax.devices(), shape)
    else:
        devices = np.array(jax.devices()[:wanted]).reshape(shape)
    return Sharding(Mesh(devices, MESH_AXES, axis_types=types), frozen)


def arrange(devices: Sequence[jax.Device], shape: Sequence[int]) -> np.ndarray:
    """Devices by mesh axes: neighbors along an axis are close to each other, slices far apart.

    Args:
      devices: all of them; those of a TPU know which slice they belong to.
      shape: devices along each of `MESH_AXES`.
    Raises:
      ConfigError: the data axis does not split over the slices.
    """
    tpu = devices[0].platform == "tpu"
    # A described topology of one slice does not number it.
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if tpu else 1
    if slices > 1 and shape[0] % slices:
        raise errors.ConfigError(
            f"mesh.data: {shape[0]} does not divide over {slices} slices, which split the data "
            "axis, the only one with little enough traffic for the data center network"
        )

    def place(split: bool) -> np.ndarray:
        if slices == 1:
            make, shapes = mesh_utils.create_device_mesh, (shape,)
        else:
            within, across = (shape[0] // slices, *shape[1:]), (slices, *(1,) * (len(shape) - 1))
            make, shapes = mesh_utils.create_hybrid_device_mesh, (within, across)
        return make(*shapes, devices, allow_split_physical_axes=split)

    try:
        return place(split=False)
    except NotImplementedError:  # an axis of the torus must serve two axes of the mesh
        return place(split=True)


def zeros(abstract: Any) -> Any:
    """Creates zeros in place of abstract arrays, inside a program."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
