"""Linear maps, embeddings and norms."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.kernels import quantized
from dflash.kernels.split_heads import rms_norm
from dflash.layers.weight_format import WeightFormat
from dflash.parallel import parameters
from dflash.parallel.compiler_options import NARROW_IN_LOOPS
from dflash.parallel.sharding import Sharding

# Suffix of the parameter path that holds the scales of an 8-bit kernel.
SCALE_SUFFIX = "_scale"


class Kernel(nnx.Module):
    """Base class of linear maps, with a kernel [..., in, out], plain or in eight bits with scales.

    The kernel is stored as [in, out], the transpose of a checkpoint's [out, in]: rows of x are then
    multiplied with contiguous columns, which is 1.7 times faster at 16 rows on a CPU.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
        stddev: float | None = None,
    ):
        """Declares the kernel.

        Args:
          shape: [..., in, out].
          axes: Logical axes of the kernel.
          stddev: Standard deviation of the initializer; None for 1 / sqrt(in).
        """
        stddev = 1 / math.sqrt(shape[-2]) if stddev is None else stddev
        self.kernel = parameters.declare(shape, axes, dtype=dtype, sharding=sharding, stddev=stddev)
        self.kernel_scale = nnx.data(None)
        self.format: WeightFormat | None = None
        self.axes, self.scale_axes = axes, ()
        self.sharding = sharding

    def quantize(self, form: WeightFormat, *, stored: bool = False) -> None:
        """Redeclares the kernel in eight bits; the kernel must still be abstract.

        Args:
          form: Format of values and scales.
          stored: The checkpoint stores values and scales in this format. Otherwise they are
            computed from its plain weights, one kernel at a time.
        """
        plain, sharding = self.kernel.get_value(), self.sharding
        *lead, inputs, outputs = plain.shape
        scales, names = (1, outputs), (None, self.axes[-1])
        if form.block is not None:
            scales = tuple(-(-n // b) for n, b in zip((inputs, outputs), form.block, strict=True))
            names = self._names_of_blocks(form.block, scales)
        # Random initial values are scaled such that they stay in range.
        stddev = quantized.LARGEST[form.dtype] / 8
        self.scale_axes = (*self.axes[:-2], *names)
        self.kernel_scale = parameters.declare(
            (*lead, *scales),
            self.scale_axes,
            dtype=jnp.float32,
            sharding=sharding,
            stddev=0.0,
            offset=self.kernel.stddev / stddev,
            is_derived=not stored,
        )
        places = plain.sharding, self.kernel_scale.get_value().sharding
        self.kernel = parameters.declare(
            plain.shape,
            self.axes,
            dtype=jnp.dtype(form.dtype),
            sharding=sharding,
            stddev=stddev,
            conversion=None
            if stored
            else _quantizer(form.dtype, plain.dtype, places, sharding.axes(self.axes[-2])),
        )
        self.format = form

    def _names_of_blocks(self, block, scales) -> tuple[str | None, str | None]:
        """Returns the logical axes of block scales; None where blocks would straddle devices."""
        shape = self.kernel.get_value().shape[-2:]
        dimensions = zip(self.axes[-2:], shape, block, scales, strict=True)
        return tuple(
            name if size % of_block == 0 and count % self.sharding.size(name) == 0 else None
            for name, size, of_block, count in dimensions
        )

    def plain(self, x: jax.Array) -> jax.Array:
        """Returns the kernel with its scales applied, in the dtype of x, for a product with x."""
        kernel = widen_late(x, self.kernel[...], self.sharding)
        if self.format is None:
            return kernel
        scale = quantized.spread(self.kernel_scale[...], kernel.shape, self.format.block)
        return (kernel.astype(jnp.float32) * scale).astype(x.dtype)


@functools.cache  # Layers of equal shapes share one compiled program.
def _quantizer(dtype: str, plain: jnp.dtype, places: tuple, across: tuple) -> parameters.Conversion:
    """Returns the conversion of a plain kernel to values and scales.

    Args:
      dtype: Dtype of the values.
      plain: Dtype of the plain kernel.
      places: Shardings of the values and of the scales.
      across: Mesh axes that inputs are sharded over.
    """
    kernel_place, scale_place = places
    if kernel_place.mesh.size == 1:
        across = ()

    def quantize(kernel):
        if kernel.ndim > 2:  # One expert at a time, to hold only one in float32.
            return jax.lax.map(quantize, kernel)
        return quantized.quantize_array(kernel, dtype, across)

    program = quantize
    if kernel_place.mesh.size > 1:
        program = jax.shard_map(
            quantize,
            mesh=kernel_place.mesh,
            in_specs=kernel_place.spec,
            out_specs=(kernel_place.spec, scale_place.spec),
            check_vma=False,
        )
    options = NARROW_IN_LOOPS if kernel_place.mesh.devices.flat[0].platform == "cpu" else None
    compiled = jax.jit(program, out_shardings=places, compiler_options=options)
    return parameters.Conversion(plain, compiled, SCALE_SUFFIX)


class Linear(Kernel):
    """Linear map x @ kernel, plus a bias if it has one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axes: tuple[str | None, str | None],
        *,
        bias: bool = False,
        dtype: jnp.dtype,
        sharding: Sharding,
        stddev: float | None = None,
    ):
        """Declares the kernel and the bias.

        Args:
          in_features: Size of an input row.
          out_features: Size of an output row.
          axes: Logical axes of the kernel [in, out].
          bias: Whether the map has a bias [out], which is never quantized.
          stddev: Standard deviation of the initializer; None for 1 / sqrt(in_features).
        """
        shape, build = (in_features, out_features), {"dtype": dtype, "sharding": sharding}
        super().__init__(shape, axes, stddev=stddev, **build)
        self.bias = (
            parameters.declare((out_features,), axes[1:], stddev=0.0, **build) if bias else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., in] to [..., out]."""
        product = self._multiply(x)
        return product if self.bias is None else product + self.bias[...]

    def _multiply(self, x: jax.Array) -> jax.Array:
        if self.format is None:
            return _project(x, self.kernel[...], self.sharding)
        if self.format.block is not None:
            return _project(x, self.plain(x), self.sharding)
        if self.format.int8_products:
            return quantized.int8_product(x, self.kernel[...], self.kernel_scale[...])
        kernel = widen_late(x, self.kernel[...], self.sharding).astype(x.dtype)
        product = _project(x, kernel, self.sharding, dtype=jnp.float32)
        return (product * self.kernel_scale[0]).astype(x.dtype)

    def attend(self, hidden: jax.Array) -> jax.Array:
        """Applies an output head: returns float32 logits [..., V] of hidden states [..., D]."""
        return _project(hidden, self.kernel[...], self.sharding, dtype=jnp.float32)

    def columns(self, tokens: np.ndarray) -> jax.Array:
        """Returns the columns [D, Q] of an output head for token ids int [Q]."""
        return jnp.take(self.kernel[...], tokens, axis=1)


class Embedding(nnx.Module):
    """Embedding table [V, D]; targets with tied embeddings also use it as their output head."""

    def __init__(self, vocab: int, width: int, *, dtype: jnp.dtype, sharding: Sharding):
        self.embedding = parameters.declare(
            (vocab, width),
            ("vocab", "embed"),
            dtype=dtype,
            sharding=sharding,
            stddev=1 / math.sqrt(width),
        )
        self.sharding = sharding

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings [..., D] of token ids int32 [...]."""
        return jnp.take(self.embedding[...], tokens, axis=0)

    def attend(self, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [..., V] of hidden states [..., D]."""
        table = self.embedding[...]
        return _project(hidden, table, self.sharding, transposed=True, dtype=jnp.float32)

    def columns(self, tokens: np.ndarray) -> jax.Array:
        """Returns the columns [D, Q] of the output head for token ids int [Q]."""
        return jnp.take(self.embedding[...], tokens, axis=0).T


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learned scale; see `rms_norm`."""

    stddev: float | None = None  # Initializer of the scale: ones.

    def __init__(self, width: int, eps: float, *, dtype: jnp.dtype, sharding: Sharding):
        self.scale = parameters.declare(
            (width,), (None,), dtype=dtype, sharding=sharding, stddev=self.stddev
        )
        self.eps = eps

    @property
    def factor(self) -> jax.Array:
        """Factor [D] of a normalized row."""
        return self.scale[...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes x [..., D]; the result has the dtype of x."""
        return rms_norm(x, self.factor, self.eps)


class Float32RMSNorm(RMSNorm):
    """Root-mean-square norm that multiplies by its scale in float32, before rounding."""

    @property
    def factor(self) -> jax.Array:
        """Factor float32 [D] of a normalized row."""
        return self.scale[...].astype(jnp.float32)


class UnscaledRMSNorm(nnx.Module):
    """Root-mean-square norm without a learned scale."""

    def __init__(self, width: int, eps: float):
        self.width, self.eps = width, eps

    @property
    def factor(self) -> jax.Array:
        """Factor float32 [D] of a normalized row, ones."""
        return jnp.ones(self.width, jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes x [..., D]; the result has the dtype of x."""
        return rms_norm(x, self.factor, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """Root-mean-square norm that multiplies by 1 + scale, in float32, as Gemma's and Qwen3.5's."""

    stddev = 0.0

    @property
    def factor(self) -> jax.Array:
        """Factor float32 [D] of a normalized row."""
        return 1.0 + self.scale[...].astype(jnp.float32)


def _project(
    x: jax.Array,
    weights: jax.Array,
    sharding: Sharding,
    *,
    transposed: bool = False,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Computes x [..., D] @ weights [D, F], or weights [F, D] if transposed.

    Args:
      x: Rows [..., D].
      weights: [D, F], or [F, D] if `transposed`.
      sharding: Mesh and platform of the arrays.
      transposed: Contract with the last dimension of `weights`.
      dtype: Dtype of the result; None for the promoted dtype of x and weights.
    """
    weights = widen_late(x, weights, sharding)
    dtype = dtype or jnp.result_type(x, weights)
    widened = sharding.platform == "cpu"
    if not _is_single_row(x, sharding):
        return _product(x, weights, transposed, dtype, widened)
    pair = jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, 1), (0, 0)))
    return _product(pair, weights, transposed, dtype, widened)[..., :1, :]


def _is_single_row(x: jax.Array, sharding: Sharding) -> bool:
    """Returns whether each device has a single row of x, on a TPU.

    XLA multiplies a single row on the vector units, which it expects to take three times as long as
    reading the weights; two rows go through the matrix unit.
    """
    if sharding.platform != "tpu" or x.ndim < 2 or x.shape[-2] != 1:
        return False
    return math.prod(x.shape[:-1]) <= sharding.size("batch")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(x, weights, transposed, dtype, widened):
    """Computes x @ weights, with a custom gradient that differs only in the order of factors.

    In the gradient of the weights, x comes first. In the opposite order, a CPU transposes a copy of
    the outputs' gradient, the larger factor, which takes a fifth of a training step.

    Args:
      x: Rows [..., D].
      weights: [D, F], or [F, D] if `transposed`.
      transposed: Contract with the last dimension of `weights`.
      dtype: Dtype of the result.
      widened: Compute products in float32 and round them: XLA on a CPU uses the matrix units for
        bfloat16 factors only if the product is in float32.
    """
    equation = "...d,fd->...f" if transposed else "...d,df->...f"
    return _multiply(equation, x, weights, dtype, widened)


def _product_forward(x, weights, transposed, dtype, widened):
    return _product(x, weights, transposed, dtype, widened), (x, weights)


def _product_backward(transposed, dtype, widened, residuals, cotangents):
    x, weights = residuals
    # Cast the gradient of float32 logits to the factors' dtype, so that no factor is widened.
    cotangents = cotangents.astype(jnp.result_type(x, weights))
    to_x = "...f,fd->...d" if transposed else "...f,df->...d"
    by_x = _multiply(to_x, cotangents, weights, x.dtype, widened)
    rows, cotangents = (array.reshape(-1, array.shape[-1]) for array in (x, cotangents))
    by_weights = _multiply("rd,rf->df", rows, cotangents, weights.dtype, widened)
    return by_x, by_weights.T if transposed else by_weights


def _multiply(equation: str, a, b, dtype: jnp.dtype, widened: bool) -> jax.Array:
    """Returns the product of two arrays in `dtype`; see `_product`."""
    product = jnp.promote_types(dtype, jnp.result_type(a, b))
    if widened and product == jnp.bfloat16:
        product = jnp.float32
    return jnp.einsum(equation, a, b, preferred_element_type=product).astype(dtype)


_product.defvjp(_product_forward, _product_backward)


def matmul_precision(dtype: jnp.dtype) -> str:
    """Returns the `jax.default_matmul_precision` for computing in `dtype`."""
    # Users choose float32 for exactness, but a TPU multiplies float32 in bfloat16 by default.
    return "highest" if dtype == jnp.float32 else "default"


def finish(product: jax.Array, sharding: Sharding) -> jax.Array:
    """Keeps XLA on a TPU from fusing a matrix product with the split of its columns into heads.

    The fused form needs transposed weights: XLA would copy the weights of every layer ahead of each
    dispatch, which doubles their memory.

    Args:
      product: Output of a linear map, returned unchanged.
      sharding: Mesh and platform of the array.
    """
    return jax.lax.optimization_barrier(product) if sharding.platform == "tpu" else product


def widen_late(x: jax.Array, weights: jax.Array, sharding: Sharding) -> jax.Array:
    """Keeps XLA on a CPU from holding float32 copies of all narrower weights at once.

    A CPU multiplies bfloat16 and 8-bit weights as float32. XLA would convert every matrix ahead of
    time, outside the decode loop, which takes three times the memory of the weights. An artificial
    dependency on x delays the conversion until the matrix is multiplied. It does nothing on other
    platforms. Inside a loop, XLA must also be kept from hoisting the conversion out of it; see
    `NARROW_IN_LOOPS`.

    Args:
      x: Rows that the weights are about to be multiplied with.
      weights: Weights, returned bit for bit unless x begins with a NaN.
      sharding: Mesh and platform of the arrays.
    """
    if sharding.platform != "cpu" or weights.dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
        return weights
    first = x.reshape(-1)[0]  # XLA recognizes and removes simpler dependencies.
    filler = jnp.nan if jnp.issubdtype(weights.dtype, jnp.floating) else 0
    other = jnp.asarray(filler, weights.dtype)
    return jnp.where(first != first, other, weights)
