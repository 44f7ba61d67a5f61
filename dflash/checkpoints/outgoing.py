"""Tensors of a module on their way into a file, one in memory at a time."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.checkpoints import tensor_map
from dflash.checkpoints.tensor_map import TensorPiece
from dflash.parallel import parameters


class OutgoingTensor:
    """Tensor to be written, whose values are fetched from the devices only when needed."""

    def __init__(self, name: str, parts: list[tuple[str, nnx.Variable, TensorPiece]], dtype):
        _, leaf, piece = parts[0]
        if isinstance(leaf, parameters.Buffer):
            dtype = leaf.stored_dtype
        self._parts = parts
        self.name = name
        self.dtype = np.dtype(dtype or leaf.get_value().dtype)
        self.shape = piece.shape
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """Returns the values on this host, in the dtype and orientation of the file."""
        if len(self._parts) == 1 and self._parts[0][2].is_whole:
            return self._fetch(*self._parts[0][1:])
        values = np.empty(self.shape, self.dtype)
        for _, leaf, piece in self._parts:
            values[piece.first : piece.first + piece.count] = self._fetch(leaf, piece)
        return values

    def _fetch(self, leaf: nnx.Variable, piece: TensorPiece) -> np.ndarray:
        value = leaf.get_value()
        # Convert a fresh array: a jax array keeps the host copy of its NumPy conversion while it
        # lives. Widen buffers on the host, since jax has no int64 here.
        weight = jnp.issubdtype(self.dtype, jnp.floating)
        fresh = _prepare(
            value,
            np.array(piece.lead, np.int32),
            np.int32(piece.at),
            count=None if piece.is_whole else piece.count,
            transposed=piece.transposed,
            dtype=self.dtype if weight else value.dtype,
        )
        if not fresh.is_fully_addressable:
            from jax.experimental import multihost_utils

            fresh = multihost_utils.process_allgather(fresh, tiled=True)
        return np.asarray(fresh).astype(self.dtype, copy=False)


def tensors_of(module: nnx.Module, dtype=None) -> list[OutgoingTensor]:
    """Returns the tensors of `module` under their checkpoint names."""
    leaves = dict(parameters.named_arrays(module))
    shapes = ((path, leaf.get_value().shape) for path, leaf in leaves.items())
    return [
        OutgoingTensor(name, [(path, leaves[path], piece) for path, piece in named_pieces], dtype)
        for name, named_pieces in tensor_map.by_tensor(module, shapes).items()
    ]


@functools.partial(jax.jit, static_argnames=("count", "transposed", "dtype"))
def _prepare(value, lead, at, *, count, transposed, dtype):
    """Returns rows at … at + count - 1 of value[lead], or all, in the orientation of the files."""
    for i in range(lead.shape[0]):
        value = jax.lax.dynamic_index_in_dim(value, lead[i], keepdims=False)
    value = value.mT if transposed else value
    if count is not None:
        value = jax.lax.dynamic_slice_in_dim(value, at, count)
    return jnp.copy(value).astype(dtype)
