"""Native checkpoint layout: config.json beside `params/`, an Orbax tree of parameters."""

import contextlib
import dataclasses
import errno
import gc
import logging as std_logging
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax import nnx, traverse_util

from dflash import errors
from dflash.checkpoints import files
from dflash.parallel import parameters

PARAMS = "params"

# Orbax restores all requested arrays at once, each through a host copy. Request only this many
# bytes at a time to limit the copies.
_GROUP_BYTES = 64 * 2**20


def load(module: nnx.Module, directory: pathlib.Path) -> None:
    """Fills the abstract arrays of `module`, each with its declared sharding and dtype."""
    leaves = dict(parameters.named_arrays(module))
    expected = parameters.readable(module)
    _check(read_shapes(directory), expected, directory)
    groups = _group(expected)
    total = sum(size for _, size in groups)
    params = (directory / PARAMS).absolute()
    values = {}
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer, quiet():
        for group in files.track(groups, total, f"reading {directory.name}"):
            arrays = restore(checkpointer, params, {path: expected[path] for path in group})
            for path, array in arrays.items():
                values |= parameters.convert(leaves[path], path, array)
    parameters.assign(module, values)


def read_shapes(directory: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every stored parameter, by dotted path, without reading any."""
    return read_tree_shapes((directory / PARAMS).absolute())


def read_tree_shapes(directory: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every array of an Orbax tree; see `read_shapes`."""
    try:
        with quiet():
            tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(directory)).tree
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in traverse_util.flatten_dict(tree, sep=".").items()
        }
    except Exception as error:  # Damage leads to many types, from json's to TensorStore's.
        raise errors.CheckpointError(
            f"{directory}: not a readable Orbax checkpoint; copy or convert the checkpoint again"
        ) from error


def stored_dtypes(directory: pathlib.Path) -> set[np.dtype]:
    """Returns the dtypes of the stored weights, without those of buffers."""
    dtypes = {np.dtype(leaf.dtype) for leaf in read_shapes(directory).values()}
    return {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}


def save(module: nnx.Module, directory: pathlib.Path) -> int:
    """Writes all parameters and buffers of `module` to params/ in `directory`.

    All processes must call this; it returns the number of arrays.
    """
    values = {path: leaf.get_value() for path, leaf in parameters.named_arrays(module)}
    save_tree(values, (directory / PARAMS).absolute())
    return len(values)


def save_tree(values: dict[str, Any], directory: pathlib.Path) -> None:
    """Writes arrays by dotted path as an Orbax tree; see `save`."""
    largest = max(value.nbytes for value in values.values())
    handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=1 + math.ceil(largest / 1e9))
    with ocp.Checkpointer(handler) as checkpointer, quiet():
        try:
            checkpointer.save(
                directory, args=ocp.args.PyTreeSave(traverse_util.unflatten_dict(values, sep="."))
            )
        except ValueError as error:  # TensorStore raises it for disks and buckets.
            reason = " ".join(str(error).split())
            raise OSError(errno.EIO, errors.shorten(reason, 200), str(directory)) from error


def _check(stored, expected, directory) -> None:
    params = directory / PARAMS
    files.check_names(stored, expected, params, files.MISFIT)
    for path, abstract in expected.items():
        files.check_shape(params, path, stored[path].shape, abstract.shape)


def _group(expected: dict[str, jax.ShapeDtypeStruct]) -> list[tuple[list[str], int]]:
    """Splits the paths, in order, into groups of about `_GROUP_BYTES`; returns (paths, bytes)."""
    groups: list[tuple[list[str], int]] = []
    for path, abstract in expected.items():
        size = abstract.size * np.dtype(abstract.dtype).itemsize
        if groups and groups[-1][1] + size <= _GROUP_BYTES:
            groups[-1] = ([*groups[-1][0], path], groups[-1][1] + size)
        else:
            groups.append(([path], size))
    return groups


def restore(
    checkpointer: ocp.Checkpointer, directory: pathlib.Path, abstract: dict[str, Any]
) -> dict[str, jax.Array]:
    """Reads the arrays of an Orbax tree that `abstract` has, with shardings, by dotted path."""
    tree = traverse_util.unflatten_dict(abstract, sep=".")
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=True,
    )
    restored = _try_restore(checkpointer, directory, args)
    if restored is None:
        raise errors.CheckpointError(
            f"{directory}: damaged, while reading {files.quote_some(abstract)}; "
            "copy or convert the checkpoint again"
        )
    return jax.block_until_ready(traverse_util.flatten_dict(restored, sep="."))


def _try_restore(checkpointer: ocp.Checkpointer, params: pathlib.Path, args: Any) -> Any:
    """Returns the arrays that Orbax restores, or None if it fails with any error.

    Arrays are read concurrently. When one fails, asyncio logs errors of the others as soon as they
    are freed. Free them here, while asyncio is silenced, and not later, while an error propagates.
    """
    try:
        return checkpointer.restore(params, args=args)
    except Exception:
        pass
    gc.collect()
    return None


def hide_abandoned() -> None:
    """Hides, from now on, failed reads and writes other than the one that is reported.

    Orbax raises the first error and closes its event loop. Further errors may surface at any later
    time, from a thread of TensorStore or an abandoned coroutine, so the hook is never removed.
    """
    if not isinstance(sys.unraisablehook, _Filter):
        sys.unraisablehook = _Filter(sys.unraisablehook)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences Orbax's error logs, since the user gets our one-line message."""
    verbosity, loop = logging.get_verbosity(), std_logging.getLogger("asyncio")
    logging.set_verbosity(logging.FATAL)
    was_disabled, loop.disabled = loop.disabled, True
    hide_abandoned()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        loop.disabled = was_disabled


@dataclasses.dataclass(frozen=True)
class _Filter:
    """Hook for `sys.unraisablehook` that drops the errors of `hide_abandoned`."""

    hook: Callable[[Any], None]

    def __call__(self, unraisable) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
            self.hook(unraisable)
