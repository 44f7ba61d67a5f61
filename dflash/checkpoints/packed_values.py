"""Packed tensors: values of four bits, or scales as exponents, in integers.

Values become int8. Those of mxfp4 are halves from 0 to 6, which are doubled to become integers, and
their scales are halved in turn, so that both are exact.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

Index = tuple[slice, ...]  # One slice per dimension; () for a tensor without dimensions.
Read = Callable[[Index], np.ndarray]  # Reads stored numbers.

# Suffixes of names; see `weight_formats.StoredFormat`.
PACKED, BLOCKS, SCALES = "weight_packed", "_blocks", "_scales"
PER_WORD = 8  # Values per int32. Source: compressed-tensors, pack-quantized.
# Source: OCP Microscaling Formats (MX) 1.0, MXFP4.
PER_SCALE = 32
_EXPONENT_BIAS = 127
_MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)  # Twice those of e2m1.
DOUBLED = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # Twice the e2m1 value of each code.


@dataclasses.dataclass(frozen=True)
class ValuePacking:
    """Packing of values in the integers of a tensor.

    Attributes:
      suffix: End of the tensors' names.
      code: Dtype of the tensors, in the notation of safetensors.
      stored_shape: Function from the shape of the values to that of the tensor.
      read: Function from (function that reads the tensor, index of values) to the values.
    """

    suffix: str
    code: str
    stored_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    read: Callable[[Read, Index], np.ndarray]


def _shape_in_words(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // PER_WORD))


_IN_ORDER = np.arange(PER_WORD, dtype=np.uint32)


def _read_words(stored: Read, index: Index) -> np.ndarray:
    return read_codes(stored, index) - np.int8(8)


def read_codes(stored: Read, index: Index, places: np.ndarray = _IN_ORDER) -> np.ndarray:
    """Reads eight codes of four bits, int8, from each int32 of the last dimension.

    Args:
      stored: Function that reads the words.
      index: Index of codes.
      places: Place of each of eight codes in its word, uint32 [8]; 0 for the lowest bits.
    """
    words = _groups(index[-1], PER_WORD)
    packed = np.ascontiguousarray(stored((*index[:-1], words))).view(np.uint32)
    codes = (packed[..., None] >> (4 * places)) & 0xF
    return _within(codes.astype(np.int8), index[-1], words, PER_WORD)


def _shape_in_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // PER_SCALE), PER_SCALE // 2)


def _read_blocks(stored: Read, index: Index) -> np.ndarray:
    """Reads twice the e2m1 values of blocks of 32, two in each byte, the low four bits first."""
    blocks = _groups(index[-1], PER_SCALE)
    pairs = _PAIRS[stored((*index[:-1], blocks, slice(0, PER_SCALE // 2)))]
    return _within(pairs.view(np.int8), index[-1], blocks, PER_SCALE)


def _pairs() -> np.ndarray:
    """Returns the two int8 values of every byte, as one int16."""
    byte = np.arange(256)
    return np.stack([DOUBLED[byte & 0xF], DOUBLED[byte >> 4]], axis=-1).view(np.int16)[:, 0]


_PAIRS = _pairs()


def halved_scales(exponents: np.ndarray) -> np.ndarray:
    """Returns half the scales, float32, of e8m0 exponents, uint8."""
    return np.ldexp(np.float32(0.5), exponents.astype(np.int32) - _EXPONENT_BIAS)


def _groups(values: slice, size: int) -> slice:
    """Returns the groups of `size` values that hold a range of values."""
    return slice(values.start // size, -(-values.stop // size))


def _within(values: np.ndarray, index: slice, groups: slice, size: int) -> np.ndarray:
    """Returns a range of values [..., n], of the values of whole groups [..., groups, …]."""
    begin = index.start - groups.start * size
    flat = values.reshape(*values.shape[: values.ndim - 2], -1)
    return flat[..., begin : begin + index.stop - index.start]


PACKINGS = (
    ValuePacking("." + PACKED, "I32", _shape_in_words, _read_words),
    ValuePacking(BLOCKS, "U8", _shape_in_blocks, _read_blocks),
    ValuePacking(SCALES, "U8", tuple, lambda stored, index: halved_scales(stored(index))),
)
