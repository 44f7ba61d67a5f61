"""Views of quantized weights in other formats, as values in eight bits [out, in] and their scales.

Values of AWQ and GPTQ are codes of four bits less a zero point for each group of inputs, from -15
to 15, so eight bits hold them exactly.

Sources: compressed-tensors, strategy "tensor"; AutoAWQ, version "gemm"; AutoGPTQ and GPTQModel.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from dflash import errors
from dflash.checkpoints import files, packed_values
from dflash.checkpoints.packed_values import PER_WORD, Index
from dflash.checkpoints.safetensors_header import StoredTensor
from dflash.checkpoints.weight_formats import AWQ, GPTQ, TENSOR, StoredFormat

Tensors = Mapping[str, StoredTensor]

_WORDS = "qweight"
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)  # Place of each output in its word.


@dataclasses.dataclass(frozen=True)
class _View(StoredTensor):
    """Tensor that is computed from others, by a function of the index."""

    compute: Callable[[Index], np.ndarray]

    def read(self, index: Index) -> np.ndarray:
        return self.compute(index)


@dataclasses.dataclass(frozen=True)
class _FourBits:
    """Tensors of one matrix: words and zeros int32 in eights of codes, scales [groups, out]."""

    words: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    inputs: StoredTensor | None  # Group of each input, int32 [in].
    stored: StoredFormat

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        rows, columns = self.words.shape
        if self.stored.layout == AWQ:
            return columns * PER_WORD, rows
        return columns, rows * PER_WORD

    def values(self, index: Index) -> np.ndarray:
        outputs, inputs = index
        size = self.shape[1] if self.stored.block is None else self.stored.block[1]
        groups = np.arange(inputs.start, inputs.stop) // size
        if self.inputs is not None and (self.inputs.read((inputs,)) != groups).any():
            raise errors.CheckpointError(
                f"{self.inputs.file}: {self.inputs.name!r}: inputs that are not grouped in their "
                "order (desc_act) are not supported; take a checkpoint quantized without desc_act"
            )
        return self._codes(outputs, inputs) - self._zero_points(outputs)[:, groups]

    def transposed_scales(self, index: Index) -> np.ndarray:
        return self.scales.read(index[::-1]).T

    def _codes(self, outputs: slice, inputs: slice) -> np.ndarray:
        if self.stored.layout == AWQ:
            return packed_values.read_codes(self.words.read, (inputs, outputs), _AWQ_PLACES).T
        return packed_values.read_codes(
            lambda index: self.words.read(index[::-1]).T, (outputs, inputs)
        )

    def _zero_points(self, outputs: slice) -> np.ndarray:
        """Returns the zero points int8 [out, groups]; GPTQ stores them less 1, modulo 16."""
        index = slice(0, self.zeros.shape[0]), outputs
        if self.stored.layout == AWQ:
            return packed_values.read_codes(self.zeros.read, index, _AWQ_PLACES).T
        codes = packed_values.read_codes(self.zeros.read, index).T
        return (codes + 1) & 0xF if self.stored.layout == GPTQ else codes


def views(tensors: Tensors, stored: StoredFormat | None) -> Tensors:
    """Returns the tensors of a checkpoint, with views in place of those of other formats.

    Raises:
      CheckpointError: A tensor is missing, or has another shape or dtype.
    """
    if stored is None or stored.layout is None:
        return tensors
    if stored.layout == TENSOR:
        return {name: _spread(tensor, tensors, stored) for name, tensor in tensors.items()}
    result = dict(tensors)
    for name in tensors:
        if name.endswith(f".{_WORDS}"):
            for view in _four_bits(name.removesuffix(_WORDS), result, stored):
                result[view.name] = view
    return result


def _spread(tensor: StoredTensor, tensors: Tensors, stored: StoredFormat) -> StoredTensor:
    """Returns a single scale as one of each output, [out, 1]; other tensors as they are."""
    name = tensor.name
    weight = tensors.get(name.removesuffix(stored.scale_suffix) + "weight")
    if not name.endswith(stored.scale_suffix) or tensor.shape not in ((), (1,)) or weight is None:
        return tensor
    scale = tuple(slice(0, 1) for _ in tensor.shape)
    shape = stored.scales_of(weight.shape)

    def compute(index: Index) -> np.ndarray:
        return np.broadcast_to(tensor.read(scale), shape)[index]

    return _View(**vars(tensor) | {"shape": shape}, compute=compute)


def _four_bits(
    prefix: str, tensors: dict[str, StoredTensor], stored: StoredFormat
) -> tuple[_View, _View]:
    """Takes the tensors of a matrix out, and returns views of its values and its scales."""
    words, inputs = tensors.pop(prefix + _WORDS), tensors.pop(f"{prefix}g_idx", None)
    beside = [tensors.pop(prefix + name, None) for name in ("qzeros", "scales")]
    if None in beside or {words.code, beside[0].code} != {"I32"} or len(words.shape) != 2:
        raise errors.CheckpointError(
            f"{words.file}: {words.name!r} is no int32 matrix with int32 qzeros and scales beside "
            "it; copy or download the checkpoint again"
        )
    zeros, scales = beside
    matrix = _FourBits(words, zeros, scales, inputs, stored)
    shape = matrix.shape
    groups = stored.scales_of(shape)[1]
    files.check_shape(zeros.file, zeros.name, zeros.shape, (groups, shape[0] // PER_WORD))
    files.check_shape(scales.file, scales.name, scales.shape, (groups, shape[0]))
    values = {"name": f"{prefix}weight", "code": "I8", "shape": shape}
    turned = {"name": prefix + stored.scale_suffix, "shape": scales.shape[::-1]}
    return (
        _View(**vars(words) | values, compute=matrix.values),
        _View(**vars(scales) | turned, compute=matrix.transposed_scales),
    )
