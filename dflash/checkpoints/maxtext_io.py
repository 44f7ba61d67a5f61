"""MaxText's checkpoint layout: items/, an Orbax tree {"params": {"params": …}} of the decoder.

The tree has no config.json: architecture and tokenizer come from a Hugging Face checkpoint of the
same model. Layers are stacked along dimension 1 (`scan_layers: true`) or stored one by one.

Source: https://maxtext.readthedocs.io, "Checkpoints"; names as in `namings.maxtext`.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from dflash import errors
from dflash.checkpoints import files, orbax_io
from dflash.checkpoints.namings.maxtext import MaxTextNames
from dflash.checkpoints.namings.origin import LAYER_AXIS, Origin
from dflash.parallel import parameters

ITEMS = "items"
_PREFIX = "params.params."


def find_items(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the tree of a checkpoint: of items/ itself, a step, or the last of several steps."""
    steps = [path for path in directory.glob("[0-9]*") if path.name.isdigit()]
    steps.sort(key=lambda path: int(path.name))
    for candidate in (directory, *reversed(steps)):
        items = candidate if candidate.name == ITEMS else candidate / ITEMS
        if items.is_dir():
            return items
    return None


def load(module: nnx.Module, directory: pathlib.Path) -> None:
    """Fills the abstract parameters of a target from the tree items/, one array at a time."""
    directory = directory.absolute()
    stored = orbax_io.read_tree_shapes(directory)
    # A checkpoint of a training run holds its step and the optimizer's state, too.
    weights = {name: leaf for name, leaf in stored.items() if name.startswith("params.")}
    by_array = _by_array(module, MaxTextNames(module, weights))
    _check(weights, by_array, directory)
    expected, values = parameters.readable(module), {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, orbax_io.quiet():
        sizes = [(name, weights[name].size) for name in by_array]
        for name in files.track(sizes, sum(size for _, size in sizes), "reading items"):
            place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shape, dtype = weights[name].shape, weights[name].dtype
            abstract = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place)}
            array = orbax_io.restore(checkpointer, directory, abstract)[name]
            for path, origin in by_array[name]:
                leaf = expected[path]
                value = origin.compute([array]).astype(leaf.dtype)
                values[path] = jax.device_put(value, leaf.sharding, may_alias=False)
    parameters.assign(module, values)


def stored_dtypes(directory: pathlib.Path) -> set[np.dtype]:
    """Returns the dtypes of the stored weights."""
    stored = orbax_io.read_tree_shapes(directory.absolute())
    return {np.dtype(leaf.dtype) for name, leaf in stored.items() if name.startswith("params.")}


def save(module: nnx.Module, directory: pathlib.Path, *, scan_layers: bool = True) -> int:
    """Writes a target to 0/items in `directory`; returns the number of arrays."""
    leaves = dict(parameters.named_parameters(module))
    arrays: dict[str, Any] = {}
    for name, members in _by_array(module, MaxTextNames(module, {}, stacked=scan_layers)).items():
        layers = []
        for path, origin in members:
            shape = list(origin.shapes[0])
            if origin.layer is not None:
                del shape[LAYER_AXIS]
            layers.append(origin.form.inverse(leaves[path].get_value(), tuple(shape)))
        stacked = members[0][1].layer is not None
        arrays[_PREFIX + name] = jnp.stack(layers, LAYER_AXIS) if stacked else layers[0]
    orbax_io.save_tree(arrays, (directory / "0" / ITEMS).absolute())
    return len(arrays)


def _by_array(module: nnx.Module, naming: MaxTextNames) -> dict[str, list[tuple[str, Origin]]]:
    """Returns the parameters that each array holds, in the order of layers."""
    members: dict[str, list[tuple[str, Origin]]] = {}
    for path, leaf in parameters.readable(module).items():
        try:
            origin = naming.origin(path, leaf.shape)
        except KeyError as error:
            raise errors.CheckpointError(f"{path}: MaxText's layout has no name for it") from error
        members.setdefault(origin.names[0], []).append((path, origin))
    for each in members.values():
        each.sort(key=lambda member: member[1].layer or 0)
    return members


def _check(stored, by_array, directory) -> None:
    files.check_names(stored, by_array, directory, files.MISFIT)
    for name, ((_, origin), *_) in by_array.items():
        files.check_shape(directory, name, stored[name].shape, origin.shapes[0])
