"""Eight-bit quantization of keys and values, per row and head, and of weights, per output or block.

The scale of a key or value row is its largest magnitude divided by the largest number of the dtype.
It depends on that row only, so a row is stored with the same bits whichever call writes it.

Scales are float32, like the scores and attention weights that they multiply, and add 4 bytes to a
row of 128. They extend along the last dimension, so that a tile of scales broadcasts over a tile of
scores and a TPU pads no row of scales in memory. Scales never multiply keys or values themselves:
q · (s k) = s (q · k) and w · (s v) = (s w) · v, which takes far fewer operations for a few queries,
and 8-bit values convert to bfloat16 without rounding.
"""

import dataclasses

import jax
import jax.numpy as jnp

# Largest number of each dtype; see `config.schema.DecodeConfig.kv_dtype`.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Rows in eight bits, with a scale per row.

    Attributes:
      values: [..., S, H], in a dtype of `LARGEST`.
      scales: float32 [..., 1, S]; row s is values[..., s, :] · scales[..., 0, s].
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the values."""
        return self.values.dtype


# Plain or quantized rows.
Rows = jax.Array | Quantized


def encode(rows: jax.Array, like: Rows) -> Rows:
    """Converts rows [..., S, H] to the storage format of `like`: casts, or quantizes to nearest.

    Raises:
      ValueError: `like` is `Quantized` with a dtype that is not in `LARGEST`.
    """
    if not isinstance(like, Quantized):
        return rows.astype(like.dtype)
    name = jnp.dtype(like.dtype).name
    if name not in LARGEST:
        raise ValueError(f"quantized rows must be {' or '.join(LARGEST)}, not {name}")
    values, scales = _in_eight_bits(rows, name, axis=-1)
    return Quantized(values, scales.mT)


def leading(rows: Rows, width: int) -> Rows:
    """Returns the first `width` elements of each row [..., S, H]; a row keeps its scale."""
    if isinstance(rows, Quantized):
        return Quantized(rows.values[..., :width], rows.scales)
    return rows[..., :width]


def split(rows: Rows, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Returns values [..., S, H] for matrix products, and their scales [..., 1, S].

    Args:
      rows: Plain rows, which are returned unchanged with None for their scales, or quantized rows.
      dtype: Dtype of the values of quantized rows; bfloat16 and float32 hold them exactly.
    """
    if isinstance(rows, Quantized):
        return rows.values.astype(dtype), rows.scales
    return rows, None


def scaled(array: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Multiplies scores or attention weights [..., R, S] by scales [..., 1, S], if given."""
    return array if scales is None else array * scales


def quantize_array(
    kernel: jax.Array, dtype: str, across: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """Quantizes a kernel [..., in, out] to eight bits.

    Args:
      kernel: Floating-point weights.
      dtype: Dtype of the values, a key of `LARGEST`.
      across: Mesh axes that the inputs are sharded over, within `jax.shard_map`.
    Returns:
      Values [..., in, out], and float32 scales [..., 1, out]; the largest weight of each output
      becomes the largest number of the dtype.
    """
    return _in_eight_bits(kernel, dtype, axis=-2, across=across)


def spread(scales: jax.Array, shape: tuple[int, ...], block: tuple[int, int] | None) -> jax.Array:
    """Repeats scales [..., in blocks, out blocks] for each weight of a kernel [..., in, out].

    Args:
      block: Inputs and outputs per block; the last blocks may be incomplete. None for scales
        [..., 1, out], which are returned unchanged.
    """
    if block is None:
        return scales
    for axis, size in zip((-2, -1), block, strict=True):
        scales = jnp.repeat(scales, size, axis=axis)
    return scales[..., : shape[-2], : shape[-1]]


def int8_product(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """Computes x @ kernel in integers, after quantizing each row of x to int8.

    Args:
      x: Rows [..., in].
      values: int8 [in, out].
      scales: float32 [1, out].
    Returns:
      [..., out] in the dtype of x.
    """
    rows, of_rows = _in_eight_bits(x, "int8", axis=-1)
    product = jnp.einsum("...d,df->...f", rows, values, preferred_element_type=jnp.int32)
    return (product.astype(jnp.float32) * of_rows * scales[0]).astype(x.dtype)


def _in_eight_bits(
    numbers: jax.Array, dtype: str, axis: int, across: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """Returns values in `dtype`, and float32 scales, whose dimension `axis` has size 1."""
    wide = numbers.astype(jnp.float32)
    peak = jnp.abs(wide).max(axis=axis, keepdims=True)
    peak = jax.lax.pmax(peak, across) if across else peak
    # Multiply instead of divide: compilers turn the division into a multiplication in some programs
    # only, so bits would differ between programs.
    scales = jnp.where(peak > 0, peak * (1.0 / LARGEST[dtype]), 1.0)
    values = wide / scales
    if dtype == "int8":
        values = jnp.round(values)
    return values.astype(dtype), scales
