"""Eight bits and scales: for keys and values by row and head, for weights by output or block.

A row's scale, of keys or values, is its largest magnitude over the largest number of the dtype. It
depends on the row alone, so a row is stored in the same bits whichever call writes it, and with
whichever other rows.

Scales are float32: they multiply scores and weights, which are float32 too, and cost 4 bytes beside
a row of 128. They lie along the last dimension, so that a tile of them fits one of scores as it is
and no row of scales is padded in a TPU's memory. The scales never multiply keys or values
themselves: q · (s k) = s (q · k) and w · (s v) = (s w) · v, which for a few queries is far less
work, and the eight bits fit bfloat16 without rounding.
"""

import dataclasses

import jax
import jax.numpy as jnp

# The largest number of each dtype; see `config.schema.DecodeConfig.kv_dtype`.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """Rows in eight bits.

    Attributes:
      values: [..., S, H] of a dtype of `LARGEST`.
      scales: float32 [..., 1, S]; row s is values[..., s, :] · scales[..., 0, s].
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the values."""
        return self.values.dtype


# Rows as they are, or in eight bits.
Rows = jax.Array | Quantised


def encode(rows: jax.Array, like: Rows) -> Rows:
    """Rows [..., S, H] as `like` stores its own: cast, or quantized to nearest.

    Raises:
      ValueError: `like` is of a dtype that has no scales here.
    """
    if not isinstance(like, Quantised):
        return rows.astype(like.dtype)
    name = jnp.dtype(like.dtype).name
    if name not in LARGEST:
        raise ValueError(f"quantized rows are {' or '.join(LARGEST)}, not {name}")
    values, scales = _in_eight_bits(rows, name, axis=-1)
    return Quantised(values, scales.mT)


def leading(rows: Rows, width: int) -> Rows:
    """The first `width` numbers of each row [..., S, H]; a row keeps its scale."""
    if isinstance(rows, Quantised):
        return Quantised(rows.values[..., :width], rows.scales)
    return rows[..., :width]


def split(rows: Rows, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Values [..., S, H] to multiply with, and their scales [..., 1, S].

    Args:
      rows: left alone if they are not quantized; then there are no scales.
      dtype: of the values if they are quantized; bfloat16 and float32 hold them exactly.
    """
    if isinstance(rows, Quantised):
        return rows.values.astype(dtype), rows.scales
    return rows, None


def scaled(array: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Scores or weights [..., R, S] times scales [..., 1, S], if there are any."""
    return array if scales is None else array * scales


def quantize_array(
    kernel: jax.Array, dtype: str, across: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """A kernel [..., in, out] in eight bits.

    Args:
      kernel: weights, floating point.
      dtype: one of `LARGEST`.
      across: mesh axes that the inputs are split over, within `jax.shard_map`.
    Returns:
      values [..., in, out] of that dtype, and float32 scales [..., 1, out]; the largest weight of
      each output is the largest number of the dtype.
    """
    return _in_eight_bits(kernel, dtype, axis=-2, across=across)


def spread(scales: jax.Array, shape: tuple[int, ...], block: tuple[int, int] | None) -> jax.Array:
    """Scales [..., in blocks, out blocks] for each weight of a kernel of shape [..., in, out].

    Args:
      block: inputs and outputs of a block; the last ones may be cut off. None: the scales are
        [..., 1, out], and are returned as they are.
    """
    if block is None:
        return scales
    for axis, size in zip((-2, -1), block, strict=True):
        scales = jnp.repeat(scales, size, axis=axis)
    return scales[..., : shape[-2], : shape[-1]]


def int8_product(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """x @ kernel by products of integers; each row of x becomes int8 by a scale of its own.

    Args:
      x: [..., in].
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
    """Values of a dtype of `LARGEST`, and float32 scales, of which `axis` has one."""
    wide = numbers.astype(jnp.float32)
    peak = jnp.abs(wide).max(axis=axis, keepdims=True)
    peak = jax.lax.pmax(peak, across) if across else peak
    # A product, for compilers may turn the quotient into one or not, from program to program.
    scales = jnp.where(peak > 0, peak * (1.0 / LARGEST[dtype]), 1.0)
    values = wide / scales
    if dtype == "int8":
        values = jnp.round(values)
    return values.astype(dtype), scales
