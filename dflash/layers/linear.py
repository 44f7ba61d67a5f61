"""Linear maps, embeddings and norms."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.kernels import quantized as quantized
from dflash.kernels.split_heads import rms_norm
from dflash.layers.weight_format import WeightFormat
from dflash.parallel import parameters
from dflash.parallel.compiler_options import NARROW_IN_LOOPS
from dflash.parallel.sharding import Sharding

# Behind the path of a kernel that is kept in eight bits.
SCALE_SUFFIX = "_scale"


class Kernel(nnx.Module):
    """Base of linear maps: a kernel [..., in, out] as it is, or in eight bits with scales.

    A kernel is stored transposed, [in, out] instead of a checkpoint's [out, in]: rows of x then
    stream against contiguous columns, 1.7 times faster at 16 rows on a CPU.
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
          axes: logical names of its dimensions.
          stddev: of fresh weights; None for 1 / sqrt(in).
        """
        stddev = 1 / math.sqrt(shape[-2]) if stddev is None else stddev
        self.kernel = parameters.declare(shape, axes, dtype=dtype, sharding=sharding, stddev=stddev)
        self.kernel_scale = nnx.data(None)
        self.format: WeightFormat | None = None
        self.axes, self.scale_axes = axes, ()
        self.sharding = sharding

    def quantize(self, form: WeightFormat, *, stored: bool = False) -> None:
        """Declares the kernel anew, in eight bits; it must be abstract still.

        Args:
          form: how.
          stored: a checkpoint has values and scales in this form. Otherwise they are made of its
            plain weights, one kernel after the other.
        """
        plain, sharding = self.kernel.get_value(), self.sharding
        *lead, inputs, outputs = plain.shape
        scales, names = (1, outputs), (None, self.axes[-1])
        if form.block is not None:
            scales = tuple(-(-n // b) for n, b in zip((inputs, outputs), form.block, strict=True))
            names = self._names_of_blocks(form.block, scales)
        # Of fresh weights: small enough to stay in range.
        stddev = quantized.LARGEST[form.dtype] / 8
        self.scale_axes = (*self.axes[:-2], *names)
        self.kernel_scale = parameters.declare(
            (*lead, *scales),
            self.scale_axes,
            dtype=jnp.float32,
            sharding=sharding,
            stddev=0.0,
            offset=self.kernel.stddev / stddev,
            is_made=not stored,
        )
        places = plain.sharding, self.kernel_scale.get_value().sharding
        self.kernel = parameters.declare(
            plain.shape,
            self.axes,
            dtype=jnp.dtype(form.dtype),
            sharding=sharding,
            stddev=stddev,
            maker=None
            if stored
            else _maker(form.dtype, plain.dtype, places, sharding.axes(self.axes[-2])),
        )
        self.format = form

    def _names_of_blocks(self, block, scales) -> tuple[str | None, str | None]:
        """Logical names of the scales' last dimensions: split as the kernel where that fits."""
        shape = self.kernel.get_value().shape[-2:]
        dimensions = zip(self.axes[-2:], shape, block, scales, strict=True)
        return tuple(
            name if size % of_block == 0 and count % self.sharding.size(name) == 0 else None
            for name, size, of_block, count in dimensions
        )

    def plain(self, x: jax.Array) -> jax.Array:
        """The kernel with its scales applied, in the dtype of x, for a product with x."""
        kernel = widen_late(x, self.kernel[...], self.sharding)
        if self.format is None:
            return kernel
        scale = quantized.spread(self.kernel_scale[...], kernel.shape, self.format.block)
        return (kernel.astype(jnp.float32) * scale).astype(x.dtype)


@functools.cache  # layers repeat their shapes: one program serves them all
def _maker(dtype: str, plain: jnp.dtype, places: tuple, across: tuple) -> parameters.Maker:
    """`across`: mesh axes that inputs are split over."""
    kernel_place, scale_place = places
    if kernel_place.mesh.size == 1:
        across = ()

    def narrow(kernel):
        if kernel.ndim > 2:  # experts one after the other: no two of them are wide at once
            return jax.lax.map(narrow, kernel)
        return quantized.quantize_array(kernel, dtype, across)

    program = narrow
    if kernel_place.mesh.size > 1:
        program = jax.shard_map(
            narrow,
            mesh=kernel_place.mesh,
            in_specs=kernel_place.spec,
            out_specs=(kernel_place.spec, scale_place.spec),
            check_vma=False,
        )
    options = NARROW_IN_LOOPS if kernel_place.mesh.devices.flat[0].platform == "cpu" else None
    compiled = jax.jit(program, out_shardings=places, compiler_options=options)
    return parameters.Maker(plain, compiled, SCALE_SUFFIX)


class Linear(Kernel):
    """x @ kernel without a bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axes: tuple[str | None, str | None],
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
        stddev: float | None = None,
    ):
        """Args: stddev: of fresh weights; None for 1 / sqrt(in_features)."""
        shape = (in_features, out_features)
        super().__init__(shape, axes, dtype=dtype, sharding=sharding, stddev=stddev)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]."""
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
        """[..., D] -> float32 logits [..., V], for a kernel that is an output head."""
        return _project(hidden, self.kernel[...], self.sharding, dtype=jnp.float32)

    def columns(self, tokens: np.ndarray) -> jax.Array:
        """Columns [D, Q] of an output head, those of `tokens` int [Q]."""
        return jnp.take(self.kernel[...], tokens, axis=1)


class Embedding(nnx.Module):
    """A token table [V, D]; tied targets use it as their output head too."""

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
        """int32 [...] -> [..., D]."""
        return jnp.take(self.embedding[...], tokens, axis=0)

    def attend(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 logits [..., V]."""
        table = self.embedding[...]
        return _project(hidden, table, self.sharding, transposed=True, dtype=jnp.float32)

    def columns(self, tokens: np.ndarray) -> jax.Array:
        """Columns [D, Q] of the output head, those of `tokens` int [Q]."""
        return jnp.take(self.embedding[...], tokens, axis=0).T


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learned scale; see `rms_norm`."""

    def __init__(self, width: int, eps: float, *, dtype: jnp.dtype, sharding: Sharding):
        self.scale = parameters.declare(
            (width,), (None,), dtype=dtype, sharding=sharding, stddev=None
        )
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D] in the dtype of x."""
        return rms_norm(x, self.scale[...], self.eps)


def join(linears: Sequence[Linear]) -> Linear:
    """One linear map in place of several of the same rows, to all of their columns.

    With few rows, a product takes as long as reading its weights, and each product has a fixed
    start-up cost: see docs/results/tpu_compile.md. Where columns are split over
    devices, every device holds its share of the first map's, then of the second's, and so on: no
    column changes devices.

    Args:
      linears: with weights or abstract; see `can_join`.
    """
    first, sharding = linears[0], linears[0].sharding
    kernels = [one.kernel.get_value() for one in linears]
    rows, columns = kernels[0].shape[0], sum(kernel.shape[1] for kernel in kernels)
    joined = Linear(rows, columns, first.axes, dtype=kernels[0].dtype, sharding=sharding)
    if first.format is not None:
        joined.quantize(first.format, stored=True)
    if isinstance(kernels[0], jax.ShapeDtypeStruct):
        return joined
    shares = sharding.size(first.axes[1])
    for name in ("kernel",) if first.format is None else ("kernel", "kernel_scale"):
        whole = getattr(joined, name)
        parts = [getattr(one, name).get_value() for one in linears]
        values = _side_by_side(shares, whole.get_value().sharding)(parts)
        # Otherwise the next layer's copy would be made before this one's sources are freed.
        whole.set_value(jax.block_until_ready(values))
    return joined


def can_join(linears: Sequence[Linear]) -> bool:
    """Whether the columns of all are split over the same mesh axes, and are kept alike.

    Blocks that share a scale may end within what is joined: these stay apart.
    """
    formats = {one.format for one in linears}
    if len(formats) > 1 or any(form is not None and form.block for form in formats):
        return False
    return len({one.sharding.axes(one.axes[1]) for one in linears}) == 1


@functools.cache  # layers repeat their shapes: one program serves them all
def _side_by_side(shares: int, place: jax.sharding.Sharding) -> Callable:
    def side_by_side(kernels):
        split = [kernel.reshape(kernel.shape[0], shares, -1) for kernel in kernels]
        return jnp.concatenate(split, axis=2).reshape(kernels[0].shape[0], -1)

    return jax.jit(side_by_side, out_shardings=place)


def _project(
    x: jax.Array,
    weights: jax.Array,
    sharding: Sharding,
    *,
    transposed: bool = False,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """x [..., D] @ weights [D, F], or [F, D] if transposed, in `dtype` (None: as they come)."""
    weights = widen_late(x, weights, sharding)
    if not _is_single_row(x, sharding):
        return _product(x, weights, transposed, dtype)
    pair = jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, 1), (0, 0)))
    return _product(pair, weights, transposed, dtype)[..., :1, :]


def _is_single_row(x: jax.Array, sharding: Sharding) -> bool:
    """Each device of a TPU has one row of x.

    XLA multiplies one row by the vector units, which it expects to take three times as long as
    reading the weights; two go through the matrix unit.
    """
    if sharding.platform != "tpu" or x.ndim < 2 or x.shape[-2] != 1:
        return False
    return math.prod(x.shape[:-1]) <= sharding.size("batch")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x, weights, transposed, dtype):
    """The product, with gradients as XLA derives them but for the order of the factors.

    In the gradient of the weights x comes first. The other way round, a CPU copies the gradient of
    the outputs, the larger of the two, into transposed order: a fifth of a training step.
    """
    equation = "...d,fd->...f" if transposed else "...d,df->...f"
    return jnp.einsum(equation, x, weights, preferred_element_type=dtype)


def _product_forward(x, weights, transposed, dtype):
    return _product(x, weights, transposed, dtype), (x, weights)


def _product_backward(transposed, dtype, kept, cotangents):
    x, weights = kept
    # Float32 logits of bfloat16 factors: no factor is widened for their gradient.
    cotangents = cotangents.astype(jnp.result_type(x, weights))
    by_x = jnp.einsum("...f,fd->...d" if transposed else "...f,df->...d", cotangents, weights)
    rows, cotangents = (array.reshape(-1, array.shape[-1]) for array in (x, cotangents))
    by_weights = jnp.einsum("rd,rf->df", rows, cotangents)
    by_weights = by_weights.T if transposed else by_weights
    return by_x.astype(x.dtype), by_weights.astype(weights.dtype)


_product.defvjp(_product_forward, _product_backward)


def matmul_precision(dtype: jnp.dtype) -> str:
    """What `jax.default_matmul_precision` should be for computing in `dtype`."""
    # float32 is chosen for exactness; a TPU would multiply it in bfloat16 by default.
    return "highest" if dtype == jnp.float32 else "default"


def finish(product: jax.Array, sharding: Sharding) -> jax.Array:
    """Keeps a TPU from splitting a product's columns into heads inside the product itself.

    XLA would: it then wants the weights transposed, and copies those of every layer, a second time
    in memory, ahead of each dispatch.

    Args:
      product: returned as it is.
      sharding: says what this runs on.
    """
    return jax.lax.optimization_barrier(product) if sharding.platform == "tpu" else product


def widen_late(x: jax.Array, weights: jax.Array, sharding: Sharding) -> jax.Array:
    """Keeps a CPU from holding a second, float32 copy of all narrower weights at once.

    A CPU multiplies bfloat16 as float32, and eight bits too. XLA would widen every matrix ahead of
    time, and outside of the decode loop: three times the memory of the weights. Made to depend on
    x, a matrix is widened when its product is due. Other platforms are left alone. (Inside
    a loop, XLA must also be kept from moving the widening out; see `Engine`.)

    Args:
      x: what the weights are about to be multiplied with.
      weights: returned as they are, bit for bit, unless x begins with a NaN.
      sharding: says what this runs on.
    """
    narrow = weights.dtype.itemsize < jnp.dtype(jnp.float32).itemsize
    if sharding.platform != "cpu" or not narrow:
        return weights
    # XLA sees through simpler dependencies and removes them.
    first = x.reshape(-1)[0]
    is_float = jnp.issubdtype(weights.dtype, jnp.floating)
    other = jnp.asarray(jnp.nan if is_float else 0, weights.dtype)
    return jnp.where(first != first, other, weights)
