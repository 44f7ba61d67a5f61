"""Mapping of logical axes to mesh axes, for every parameter, cache and activation.

Logical axes name the dimensions of an array by meaning ("heads", "vocab", "batch"). Rules map each
to the mesh axes that split it. A dimension that does not divide evenly raises an error; it is never
silently replicated.
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
    """Mesh, and the rules that map logical axes onto it.

    It is hashable, so that modules can hold it as static metadata.

    Attributes:
      exact: Whether the order of sums does not depend on the place of a row in its block: devices
        add up in their order, and keys by position; see `DecodeConfig.exact`.
    """

    mesh: Mesh | AbstractMesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    exact: bool = False

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the mesh, of every process."""
        return tuple(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        """Platform of the devices, such as "tpu"; "unknown" for an abstract mesh."""
        return "unknown" if isinstance(self.mesh, AbstractMesh) else self.devices[0].platform

    def axes(self, name: str | None) -> tuple[str, ...]:
        """Returns the mesh axes of more than one device that split logical axis `name`."""
        if name is None:
            return ()
        return tuple(axis for axis in dict(self.rules)[name] if self.mesh.shape[axis] > 1)

    def size(self, name: str | None) -> int:
        """Returns the number of shards of logical axis `name`."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(name))

    def spec(self, *names: str | None) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions have these logical names.

        Raises:
          ConfigError: A name has no rule, or two dimensions map to the same mesh axis.
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
        """Returns an array's NamedSharding; raises ConfigError if a dimension does not divide."""
        spec = self.spec(*names)
        for length, name in zip(shape, names, strict=True):
            if length % self.size(name):
                raise errors.ConfigError(
                    f"mesh: axis {name!r} of length {length} does not divide over "
                    f"{self.size(name)} devices ({' × '.join(self.axes(name))})"
                    f"{self._suggestion(length, name)}"
                )
        return NamedSharding(self.mesh, spec)

    def _suggestion(self, length: int, name: str) -> str:
        """Returns a mesh of as many devices over which the axis does divide, as the message's end.

        The devices that are left over go to the data axis.
        """
        if self.axes(name) != ("tensor",):
            return ""
        size = self.size(name)
        tensor = math.gcd(length, size)
        data = self.mesh.shape["data"] * size // tensor
        return f"; as many devices: mesh.tensor={tensor} mesh.data={data}"

    def abstract(self, shape, names, dtype) -> jax.ShapeDtypeStruct:
        """Returns an abstract array with shape, dtype and sharding, which takes no memory."""
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.named(shape, names))

    def replicated(self) -> NamedSharding:
        """Returns the sharding of an array that is replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, array: jax.Array, *names: str | None) -> jax.Array:
        """Pins the layout of an activation inside a jitted program."""
        if self.mesh.size == 1:
            return array
        return jax.lax.with_sharding_constraint(array, self.named(array.shape, names))

    def map(self, function, in_names, out_names):
        """Wraps `function` in `jax.shard_map`; returns it unchanged on a single device.

        Args:
          function: Function of arrays, or of pytrees whose arrays share one layout.
          in_names: Logical names of the dimensions of each argument.
          out_names: Logical names of the dimensions of each result.
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
        """Returns the index of this device's shard of logical axis `name`, inside `map`."""
        return jax.lax.axis_index(self.axes(name)) if self.axes(name) else 0


def make_sharding(
    axis_sizes: Mapping[str, int],
    rules: Mapping[str, Sequence[str]],
    *,
    abstract: bool = False,
    exact: bool = False,
) -> Sharding:
    """Builds the sharding of a config.

    Args:
      axis_sizes: Number of devices along each of `MESH_AXES`; 1 if omitted.
      rules: Mesh axes by logical axis.
      abstract: Build an abstract mesh, without touching devices (`--dry_run`).
      exact: See `Sharding`.
    Raises:
      ConfigError: A rule names an unknown mesh axis, or the mesh needs more devices than exist.
    """
    for name, axes in rules.items():
        for axis in axes:
            if axis not in MESH_AXES:
                near = registry.suggest(axis, MESH_AXES)
                raise errors.ConfigError(f"sharding_rules.{name}: unknown mesh axis {axis!r}{near}")
    batch, pages = rules.get("batch"), rules.get("pages")
    if pages is not None and tuple(pages) != tuple(batch or ()):
        # Page tables index pages of the same device: a sequence must share it with its pages.
        raise errors.ConfigError(
            f"sharding_rules: batch {list(batch or ())} and pages {list(pages)} differ; "
            "give both the same axes"
        )
    frozen = tuple(sorted((name, tuple(axes)) for name, axes in rules.items()))
    shape = tuple(axis_sizes.get(axis, 1) for axis in MESH_AXES)
    # With explicit axes, jax's default, every layer would have to declare its output sharding.
    types = (AxisType.Auto,) * len(MESH_AXES)
    if abstract:
        return Sharding(AbstractMesh(shape, MESH_AXES, axis_types=types), frozen, exact)
    needed, present = math.prod(shape), jax.device_count()
    several = jax.process_count() > 1
    if needed > present or (several and needed != present):
        rest = ", all of which several processes must use" if several else ""
        raise errors.ConfigError(
            f"mesh: {' × '.join(MESH_AXES)} = {' × '.join(map(str, shape))} = {needed} devices, "
            f"but {present} are present{rest}"
        )
    if needed == present:
        devices = arrange(jax.devices(), shape)
    else:
        devices = np.array(jax.devices()[:needed]).reshape(shape)
    return Sharding(Mesh(devices, MESH_AXES, axis_types=types), frozen, exact)


def beside(sharding: Sharding, count: int) -> Sharding:
    """Returns a sharding over `count` further devices, which split tensors.

    Args:
      sharding: Sharding whose rules it has, and whose devices it leaves alone.
    Raises:
      ConfigError: Fewer devices are left, or the run has several processes.
    """
    shape = tuple(count if axis == "tensor" else 1 for axis in MESH_AXES)
    types = (AxisType.Auto,) * len(MESH_AXES)
    if isinstance(sharding.mesh, AbstractMesh):
        return Sharding(AbstractMesh(shape, MESH_AXES, axis_types=types), sharding.rules)
    if jax.process_count() > 1:
        raise errors.ConfigError(
            "drafter.devices: devices of the drafter's own need a run of one process; leave it out"
        )
    present = jax.devices()
    free = [device for device in present if device not in sharding.devices]
    if count > len(free):
        raise errors.ConfigError(
            f"drafter.devices: {count}, but the target's mesh leaves {len(free)} of {len(present)} "
            f"device{'s' if len(present) > 1 else ''}; use fewer, or leave drafter.overlap out"
        )
    return Sharding(
        Mesh(np.array(free[:count]).reshape(shape), MESH_AXES, axis_types=types), sharding.rules
    )


def arrange(devices: Sequence[jax.Device], shape: Sequence[int]) -> np.ndarray:
    """Arranges devices in a mesh so that neighbors along an axis are physically close.

    Only the data axis crosses TPU slices.

    Args:
      devices: All devices; TPU devices carry their slice index.
      shape: Number of devices along each of `MESH_AXES`.
    Raises:
      ConfigError: The data axis does not divide over the slices.
    """
    tpu = devices[0].platform == "tpu"
    # Devices of an ahead-of-time topology with one slice have no slice index.
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
    except NotImplementedError:  # two mesh axes have to share one axis of the torus
        return place(split=True)


def zeros(abstract: Any) -> Any:
    """Creates zeros in place of abstract arrays, inside a program."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
