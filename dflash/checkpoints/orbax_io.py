"""Trees of arrays as Orbax stores them: those of MaxText's checkpoints, and of training."""

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
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax import traverse_util

from dflash import errors
from dflash.checkpoints import files


def read_tree_shapes(directory: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every array of an Orbax tree, by dotted path."""
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


def save_tree(values: dict[str, Any], directory: pathlib.Path) -> None:
    """Writes arrays by dotted path as an Orbax tree; all processes must call this."""
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
