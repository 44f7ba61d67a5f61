"""Plans of updates: how the parameters of a target follow from trees of one form.

A trainer's trees are alike in every step, so names and shapes are checked, and the program that
writes them is built, for the first of them only.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.checkpoints import files, foreign_trees
from dflash.checkpoints.namings.origin import Naming, Origin
from dflash.kernels import weights_cpu
from dflash.kernels.matmul_cpu import to_panels
from dflash.layers.linear import JOINED, side_by_side
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.parameters import Conversion

MISFIT = "these weights do not belong to this target, whose weights stay as they were"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter, or a quantized one with its scales, and how it follows from a tree.

    Attributes:
      paths: Path of the parameter, then that of its scales if it is quantized.
      parts: Origins of the parameter's parts; several if projections are joined.
      dtype: Dtype before quantization.
      places: Shardings of the parameter and of its scales.
      num_shards: Shards of a joined projection's columns.
      in_panels: The parameter is stored in panels; see `matmul_cpu.to_panels`.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[Origin, ...]
    dtype: jnp.dtype
    places: tuple[jax.sharding.Sharding, ...]
    num_shards: int
    conversion: Conversion | None
    in_panels: bool

    def compute(self, flat: Mapping[str, Any]) -> tuple[jax.Array, ...]:
        """Computes the parameter, and its scales if it is quantized."""
        arrays = [flat[name] for part in self.parts for name in part.names]
        if self._is_assembled(arrays):
            first = self.parts[0]
            options = {"transposed": first.transposed, "layer": first.layer}
            return (weights_cpu.assemble(arrays, self.shape, **options),)
        parts = (part.compute([flat[name] for name in part.names]) for part in self.parts)
        return self.finish([part.astype(self.dtype) for part in parts])

    def _is_assembled(self, arrays: Sequence[jax.Array]) -> bool:
        """Returns whether the kernel for a CPU copies the arrays to the parameter."""
        first = self.parts[0]
        is_matrix = len(self.shape) == (3 if self.in_panels else 2)
        is_copy = first.layer is None and not first.transposed and not self.in_panels
        alike = all(
            (part.transposed, part.layer) == (first.transposed, first.layer)
            and part.form.keeps_order
            for part in self.parts
        )
        return (
            (self.dtype == jnp.float32 and self.conversion is None and is_matrix and alike)
            and not (is_copy and len(arrays) == 1)  # XLA copies a whole array as fast.
            and is_one_cpu(self.places[0])
            and all(map(weights_cpu.is_supported, arrays))
        )

    def finish(self, parts: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Joins and quantizes the parts, and divides them into panels."""
        matrix = parts[0]
        if len(parts) > 1:
            matrix = side_by_side(self.num_shards, self.places[0])(parts)
        values = (matrix,) if self.conversion is None else self.conversion.program(matrix)
        return (to_panels(values[0]), *values[1:]) if self.in_panels else tuple(values)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Update of a target by trees of one form.

    Attributes:
      form: Form of the trees; see `form_of`.
      names: Names of the arrays that the parameters follow from.
      places: Places of these arrays among the leaves of a tree.
      copies: Names and places of arrays that a tree holds a second time, and of their originals.
      write: Program from the old parameters, which it overwrites, and the arrays to the new ones.
        None if arrays are not on the devices of the target, in the same order, or if parameters are
        quantized, by programs of their own.
    """

    form: tuple
    entries: tuple[Entry, ...]
    names: tuple[str, ...]
    places: tuple[int, ...]
    copies: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    variables: Mapping[str, nnx.Variable]
    write: Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]] | None

    def fits(self, target: Decoder, form: tuple) -> bool:
        """Returns whether a tree has the plan's form, and the target the plan's variables."""
        return form == self.form and parameters.owns(target, self.variables)


def form_of(tree: Any, lora_alpha: float | None) -> tuple[tuple, list[Any]]:
    """Returns what a plan depends on, structure, shapes, dtypes and places; and the leaves."""
    leaves, structure = jax.tree.flatten(tree)
    fields = "shape", "dtype", "sharding"
    forms = [tuple(getattr(leaf, field, None) for field in fields) for leaf in leaves]
    return (lora_alpha, structure, forms), leaves


def make_plan(target: Decoder, tree: Any, lora_alpha: float | None) -> Plan:
    """Returns the plan of a target for trees like this one, whose names and shapes it checks.

    Raises:
      CheckpointError: An array is missing, unknown, or of another shape or kind.
    """
    flat = foreign_trees.flatten(tree)
    naming = foreign_trees.find_naming(target, flat, lora_alpha=lora_alpha)
    variables = dict(parameters.named_arrays(target))
    entries = _entries(target, variables, naming)
    expected = {
        name: (shape, entry.dtype)
        for entry in entries
        for part in entry.parts
        for name, shape in zip(part.names, part.shapes, strict=True)
    }
    _check_tree(flat, expected, naming)
    names, devices = tuple(expected), tuple(target.sharding.mesh.devices.flat)
    places = {name: place for place, name in enumerate(flat)}
    shardings = (getattr(flat[name], "sharding", None) for name in names)
    is_local = all(_devices(sharding) == devices for sharding in shardings)
    is_quantized = any(entry.conversion is not None for entry in entries)
    return Plan(
        form_of(tree, lora_alpha)[0],
        entries,
        names,
        tuple(places[name] for name in names),
        tuple(
            ((copy, places[copy]), (original, places[original]))
            for copy, original in target.checkpoint_copies.items()
            if copy in flat and original in names
        ),
        {path: variables[path] for entry in entries for path in entry.paths},
        _writer(entries, names) if is_local and not is_quantized else None,
    )


def _entries(
    target: Decoder, variables: Mapping[str, nnx.Variable], naming: Naming
) -> tuple[Entry, ...]:
    """Returns the entries of all parameters; raises CheckpointError if the naming lacks one."""
    packed = getattr(target, "packed", ())
    entries, unarranged = [], None
    for path, leaf in parameters.readable_of(variables).items():
        metadata = variables[path].get_metadata()
        names = [path]
        joined, in_panels = re.search(r"\.(\w+_proj)\.", path), metadata.get("in_panels", False)
        if joined and joined[1] in JOINED:
            names = [path.replace(joined[1], part) for part in JOINED[joined[1]]]
        shapes = [leaf.shape]
        if in_panels or len(names) > 1:
            unarranged = _unarranged_shapes(target) if unarranged is None else unarranged
            shapes = [unarranged[name] for name in names]
        conversion = metadata.get("conversion")
        paths = (path,) if conversion is None else (path, path + conversion.suffix)
        try:
            parts = tuple(map(naming.origin, names, shapes))
        except KeyError as error:
            parts = ()
            unnamed = error.args[0]
        if not parts or path in packed:
            raise errors.CheckpointError(
                f"weights: {path if parts else unnamed}: this tree has no name for it; give a tree "
                "with the names of Hugging Face, and a target that is not stored in eight bits"
            )
        places = tuple(variables[each].get_value().sharding for each in paths)
        if in_panels:  # on one device; this place suits the matrix and its panels
            places = (target.sharding.replicated(), *places[1:])
        entries.append(
            Entry(
                paths,
                tuple(leaf.shape),
                parts,
                leaf.dtype,
                places,
                target.sharding.size(metadata["axes"][-1]) if len(names) > 1 else 1,
                conversion,
                in_panels,
            )
        )
    return tuple(entries)


def _unarranged_shapes(target: Decoder) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a target's parameters before `weights.arrange`, by path."""
    plain = type(target)(target.arch, dtype=target.dtype, sharding=target.sharding)
    return {path: leaf.get_value().shape for path, leaf in parameters.named_parameters(plain)}


def _check_tree(
    flat: Mapping[str, Any],
    expected: Mapping[str, tuple[tuple[int, ...] | None, jnp.dtype]],
    naming: Naming,
) -> None:
    """Raises CheckpointError if an array is missing, unknown, or of another shape or kind."""
    names = {name for name in flat if name in expected or not naming.ignores(name)}
    files.check_names(names, expected, "weights", MISFIT)
    for name, (shape, dtype) in expected.items():
        if shape is not None and np.shape(flat[name]) != tuple(shape):
            raise errors.CheckpointError(
                f"weights: tensor {name!r} has shape {list(np.shape(flat[name]))}, expected "
                f"{list(shape)}; {MISFIT}"
            )
        kind = jnp.dtype(flat[name].dtype)
        if jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(kind, jnp.floating):
            raise errors.CheckpointError(
                f"weights: tensor {name!r} is {kind}, expected floating-point numbers; {MISFIT}"
            )


@functools.lru_cache(maxsize=8)  # Targets of the same structure share one program.
def _writer(entries: tuple[Entry, ...], names: tuple[str, ...]) -> Callable:
    def write(old, arrays):
        del old  # Its buffers are donated to the results.
        flat = dict(zip(names, arrays, strict=True))
        return [value for entry in entries for value in entry.compute(flat)]

    places = [place for entry in entries for place in entry.places]
    return jax.jit(write, donate_argnums=0, keep_unused=True, out_shardings=places)


def is_one_cpu(place: jax.sharding.Sharding) -> bool:
    """Returns whether arrays with this sharding are on one CPU device."""
    return [device.platform for device in place.device_set] == ["cpu"]


def _devices(place: jax.sharding.Sharding | None) -> tuple | None:
    if isinstance(place, jax.sharding.NamedSharding):
        return tuple(place.mesh.devices.flat)
    if isinstance(place, jax.sharding.SingleDeviceSharding):
        return tuple(place.device_set)
    return None
