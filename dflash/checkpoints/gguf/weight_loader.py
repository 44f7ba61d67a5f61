"""GGUF layout: model.gguf, or a link to such a file; its weights are dequantized piece by piece."""

import pathlib

import numpy as np
from flax import nnx

from dflash.checkpoints import safetensors_io, tensor_map
from dflash.checkpoints.gguf import hf_tensors, stored_values
from dflash.checkpoints.safetensors_header import BUFFER_DTYPES, PACKED_CODE, PLAIN_DTYPES
from dflash.parallel import parameters


def load(module: nnx.Module, directory: pathlib.Path) -> None:
    """Fills the abstract parameters of `module`; see `safetensors_io.load`.

    Raises:
      CheckpointError: The file is damaged, or its tensors do not fit the module.
    """
    tensors = hf_tensors.read_tensors(directory)
    if getattr(module, "stored_format", None) == stored_values.Q8_0_FORMAT:
        shapes = ((path, leaf.shape) for path, leaf in parameters.readable(module).items())
        suffix = module.stored_format.scale_suffix
        scales = (name for name in tensor_map.by_tensor(module, shapes) if name.endswith(suffix))
        kept = {name.removesuffix(suffix) + "weight" for name in scales}
        tensors = hf_tensors.in_eight_bits(tensors, kept)
    safetensors_io.load_tensors(module, tensors, (directory / hf_tensors.WEIGHTS).resolve())


def stored_dtypes(directory: pathlib.Path) -> set[np.dtype]:
    """Returns the dtypes of the weights; quantized ones count as float32.

    Raises:
      CheckpointError: The file is damaged or its model is unsupported.
    """
    tensors = hf_tensors.read_tensors(directory)
    packed = {*BUFFER_DTYPES, PACKED_CODE}
    codes = {tensor.code for tensor in tensors.values()} - packed
    return {np.dtype(PLAIN_DTYPES[code]) for code in codes}
