"""Replacement of a target's weights in place, from the tree of a trainer.

A tree is checked as a whole before anything is written: names, shapes, and that every number is
finite. Each new parameter is then written into the buffer of the old one, so that the weights
never exist twice. Programs are not affected, since shapes, dtypes and shardings stay the same.
Cached keys and values belong to the old weights, so the holder of a cache must drop it.
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
from dflash.layers.joining import JOINED, side_by_side
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.parameters import Conversion


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A parameter, or a quantized one with its scales, and how it follows from a tree.

    Attributes:
      paths: Path of the parameter, then that of its scales if it is quantized.
      parts: Origins of the parameter's parts; several if projections are joined.
      dtype: Dtype of the parameter before quantization.
      places: Shardings of the parameter and of its scales.
      num_shards: Shards of a joined projection's columns.
      conversion: Quantization, if any.
    """

    paths: tuple[str, ...]
    parts: tuple[Origin, ...]
    dtype: jnp.dtype
    places: tuple[jax.sharding.Sharding, ...]
    num_shards: int
    conversion: Conversion | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays that the parameter follows from."""
        return tuple(name for part in self.parts for name in part.names)

    def compute(self, flat: Mapping[str, Any]) -> tuple[jax.Array, ...]:
        """Computes the parameter, and its scales if it is quantized."""
        parts = (part.compute([flat[name] for name in part.names]) for part in self.parts)
        return self.finish([part.astype(self.dtype) for part in parts])

    def finish(self, parts: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Joins and quantizes the parts."""
        whole = parts[0]
        if len(parts) > 1:
            whole = side_by_side(self.num_shards, self.places[0])(parts)
        return (whole,) if self.conversion is None else tuple(self.conversion.program(whole))


def update(target: Decoder, tree: Any, *, lora_alpha: float | None = None) -> None:
    """Replaces the weights of a target in place; every engine over it decodes with the new ones.

    Args:
      target: Target, with weights.
      tree: Weights under the names of Hugging Face, Tunix or MaxText; see `foreign_trees`. Its
        arrays may be on other devices, are copied, and stay valid.
      lora_alpha: Numerator of the scale of LoRA parameters in the tree, which are merged.
    Raises:
      CheckpointError: An array is missing, unknown, of another shape, or not finite. The old
        weights are then unchanged.
    """
    flat = foreign_trees.flatten(tree)
    naming = foreign_trees.find_naming(target, flat, lora_alpha=lora_alpha)
    variables = dict(parameters.named_arrays(target))
    entries = _entries(target, variables, naming)
    _check_tree(flat, entries, naming)
    # A trainer may forbid transfers around its own work, as Tunix does.
    with jax.transfer_guard("allow"):
        if _can_write_together(target, flat, entries):
            _check_finite_together(flat, entries)
            _write_together(flat, entries, variables)
        else:
            _check_finite_apart(flat, entries)
            _write_apart(flat, entries, variables)


def have_same_forms(params: Any, others: Any) -> bool:
    """Returns whether two states of parameters have the same paths, shapes and dtypes."""
    forms, other = (jax.tree.map(lambda x: (x.shape, x.dtype), each) for each in (params, others))
    return forms == other


def _entries(
    target: Decoder, variables: Mapping[str, nnx.Variable], naming: Naming
) -> tuple[_Entry, ...]:
    """Returns the entries of all parameters.

    Raises:
      CheckpointError: The naming has no name for a parameter.
    """
    packed = getattr(target, "packed", ())
    entries, unjoined = [], None
    for path, leaf in parameters.readable_of(variables).items():
        metadata = variables[path].get_metadata()
        names = [path]
        joined = re.search(r"\.(\w+_proj)\.", path)
        if joined and joined[1] in JOINED:
            names = [path.replace(joined[1], part) for part in JOINED[joined[1]]]
            unjoined = _unjoined_shapes(target) if unjoined is None else unjoined
        shapes = [leaf.shape] if len(names) == 1 else [unjoined[name] for name in names]
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
        entries.append(
            _Entry(
                paths,
                parts,
                leaf.dtype,
                tuple(variables[each].get_value().sharding for each in paths),
                target.sharding.size(metadata["axes"][-1]) if len(names) > 1 else 1,
                conversion,
            )
        )
    return tuple(entries)


def _unjoined_shapes(target: Decoder) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a target's parameters before projections are joined, by path."""
    plain = type(target)(target.arch, dtype=target.dtype, sharding=target.sharding)
    return {path: leaf.get_value().shape for path, leaf in parameters.named_parameters(plain)}


# --- checks -------------------------------------------------------------------------------------


def _check_tree(flat: Mapping[str, Any], entries: Sequence[_Entry], naming: Naming) -> None:
    """Checks names, shapes and dtypes.

    Raises:
      CheckpointError: An array is missing, unknown, or of another shape or kind.
    """
    shapes = {
        name: shape
        for entry in entries
        for part in entry.parts
        for name, shape in zip(part.names, part.shapes, strict=True)
    }
    misfit = "these weights do not belong to this target, whose weights stay as they were"
    given = {name for name in flat if name in shapes or not naming.ignores(name)}
    files.check_names(given, shapes, "weights", misfit)
    for name, shape in shapes.items():
        array = flat[name]
        if shape is not None and np.shape(array) != tuple(shape):
            raise errors.CheckpointError(
                f"weights: tensor {name!r} has shape {list(np.shape(array))}, expected "
                f"{list(shape)}; {misfit}"
            )
        if getattr(array, "is_deleted", bool)():
            raise errors.CheckpointError(
                f"weights: tensor {name!r} was donated or deleted; give the trainer's current "
                "arrays"
            )


def _check_finite_together(flat: Mapping[str, Any], entries: Sequence[_Entry]) -> None:
    names = _used(entries)
    finite = _all_finite([flat[name] for name in names])
    _raise_if_not(dict(zip(names, np.asarray(finite), strict=True)))


def _check_finite_apart(flat: Mapping[str, Any], entries: Sequence[_Entry]) -> None:
    flags = {name: _all_finite([flat[name]]) for name in _used(entries)}
    _raise_if_not({name: bool(np.asarray(flag)[0]) for name, flag in flags.items()})


def _raise_if_not(finite: Mapping[str, bool]) -> None:
    wrong = [name for name, is_finite in finite.items() if not is_finite]
    if wrong:
        raise errors.CheckpointError(
            f"weights: {len(wrong)} tensors hold NaN or infinite numbers: "
            f"{files.quote_some(wrong)}; the target's weights stay as they were"
        )


@jax.jit
def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns whether all numbers of each array are finite, bool [n]."""
    return jnp.stack([_is_finite(array) for array in arrays])


def _is_finite(array: jax.Array) -> jax.Array:
    """Returns whether all numbers are finite, faster than by a test of each.

    A NaN or an infinity survives a maximum, and becomes NaN in a product with zeros.
    """
    if array.ndim < 2 or array.dtype != jnp.float32:  # A CPU would widen a copy for the product.
        return jnp.isfinite(jnp.abs(array).max())
    return jnp.isfinite(jnp.tensordot(array, jnp.zeros(array.shape[-1]), axes=1)).all()


def _used(entries: Sequence[_Entry]) -> list[str]:
    return list(dict.fromkeys(name for entry in entries for name in entry.names))


# --- writing ------------------------------------------------------------------------------------


def _can_write_together(
    target: Decoder, flat: Mapping[str, Any], entries: Sequence[_Entry]
) -> bool:
    """Returns whether one program can write all parameters.

    All arrays must be on the devices of the target, in the same order. Quantization is a program of
    its own.
    """
    if any(entry.conversion is not None for entry in entries):
        return False
    devices = tuple(target.sharding.mesh.devices.flat)
    places = (getattr(flat[name], "sharding", None) for name in _used(entries))
    return all(_devices(place) == devices for place in places)


def _devices(place: jax.sharding.Sharding | None) -> tuple | None:
    if isinstance(place, jax.sharding.NamedSharding):
        return tuple(place.mesh.devices.flat)
    if isinstance(place, jax.sharding.SingleDeviceSharding):
        return tuple(place.device_set)
    return None


def _write_together(
    flat: Mapping[str, Any], entries: tuple[_Entry, ...], variables: Mapping[str, nnx.Variable]
) -> None:
    """Writes all parameters by one program, which donates the old ones."""
    old = [[variables[path].get_value() for path in entry.paths] for entry in entries]
    values = _writer(entries)(old, {name: flat[name] for name in _used(entries)})
    for entry, new in zip(entries, values, strict=True):
        _assign(entry, variables, new)


@functools.lru_cache(maxsize=8)
def _writer(entries: tuple[_Entry, ...]) -> Callable:
    def write(old, flat):
        del old  # Its buffers are donated to the results.
        return [entry.compute(flat) for entry in entries]

    places = [entry.places for entry in entries]
    return jax.jit(write, donate_argnums=0, keep_unused=True, out_shardings=places)


def _write_apart(
    flat: Mapping[str, Any], entries: Sequence[_Entry], variables: Mapping[str, nnx.Variable]
) -> None:
    """Computes each parameter on the devices of its arrays, and moves it to those of the target."""
    for entry in entries:
        parts = [
            # Layers of equal shapes share one program, whatever their names and numbers.
            _compute(
                dataclasses.replace(part, names=(), layer=None),
                entry.dtype,
                [flat[name] for name in part.names],
                None if part.layer is None else np.int32(part.layer),
            )
            for part in entry.parts
        ]
        for path in entry.paths:
            variables[path].get_value().delete()
        # An alias of the trainer's array would end with it.
        parts = [jax.device_put(part, entry.places[0], may_alias=False) for part in parts]
        _assign(entry, variables, entry.finish(parts))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute(
    origin: Origin, dtype: jnp.dtype, arrays: Sequence[jax.Array], layer: jax.Array | None
) -> jax.Array:
    return origin.compute(arrays, layer).astype(dtype)


def _assign(
    entry: _Entry, variables: Mapping[str, nnx.Variable], values: Sequence[jax.Array]
) -> None:
    for path, value in zip(entry.paths, values, strict=True):
        variables[path].set_value(value)
