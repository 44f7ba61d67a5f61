"""Linear maps, with quantized kernels, low-rank adapters and joins; embeddings and norms."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.kernels import matmul_cpu, quantized
from dflash.kernels.split_heads import rms_norm
from dflash.layers.products import project, widen_late
from dflash.parallel import parameters
from dflash.parallel.compiler_options import NARROW_IN_LOOPS
from dflash.parallel.sharding import Sharding

_to_panels = jax.jit(matmul_cpu.to_panels)

# Suffix of the parameter path that holds the scales of an 8-bit kernel.
SCALE_SUFFIX = "_scale"


INT8, FLOAT8 = "int8", "float8_e4m3fn"
# Names of joined projections, with the parts that their columns hold.
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "kv_proj": ("k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """Eight-bit format of a kernel [in, out]: quantized values, and scales that multiply them.

    Attributes:
      dtype: Dtype of the values, INT8 or FLOAT8.
      block: Inputs and outputs that share a scale; None for one scale per output.
      int8_products: Also quantize each row of the input to int8, with one scale per row, so that
        matrix products multiply integers.
    """

    dtype: str
    block: tuple[int, int] | None = None
    int8_products: bool = False


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
            else _quantizer(
                form.dtype,
                plain.dtype,
                places,
                sharding.axes(self.axes[-2]),
                sharding.platform,
            ),
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
def _quantizer(
    dtype: str, plain: jnp.dtype, places: tuple, across: tuple, platform: str
) -> parameters.Conversion:
    """Returns the conversion of a plain kernel to values and scales."""
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
    options = NARROW_IN_LOOPS if platform == "cpu" else None
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
          axes: Logical axes of the kernel [in, out].
          bias: Whether the map has a bias [out], which is never quantized.
        """
        shape, build = (in_features, out_features), {"dtype": dtype, "sharding": sharding}
        super().__init__(shape, axes, stddev=stddev, **build)
        self.bias = (
            parameters.declare((out_features,), axes[1:], stddev=0.0, **build) if bias else None
        )
        self.dtype = jnp.dtype(dtype)
        # Updates of the map by adapters, a `LowRank`; None without adapters.
        self.low_rank = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., in] to [..., out]."""
        product = self._multiply(x)
        if self.low_rank is not None and (update := self.low_rank(x)) is not None:
            product = product + update
        return product if self.bias is None else product + self.bias[...]

    def _multiply(self, x: jax.Array) -> jax.Array:
        contracted = self.axes[0]
        if self.format is None:
            return project(x, self.kernel[...], self.sharding, contracted=contracted)
        if self.format.block is not None:
            return project(x, self.plain(x), self.sharding, contracted=contracted)
        if self.format.int8_products:
            return quantized.int8_product(x, self.kernel[...], self.kernel_scale[...])
        options = {"dtype": jnp.float32, "contracted": contracted}
        product = project(x, self.kernel[...], self.sharding, **options)
        return (product * self.kernel_scale[0]).astype(x.dtype)

    def attend(self, hidden: jax.Array) -> jax.Array:
        """Applies an output head: returns float32 logits [..., V] of hidden states [..., D]."""
        return project(hidden, self.kernel[...], self.sharding, dtype=jnp.float32)

    @property
    def head(self) -> tuple[jax.Array, bool]:
        """Weights [D, V] of an output head, and that they are not transposed."""
        return self.kernel[...], False

    def columns(self, tokens: np.ndarray) -> jax.Array:
        """Returns the columns [D, Q] of an output head for token ids int [Q]."""
        return jnp.take(self.kernel[...], tokens, axis=1)

    def use_panels(self) -> None:
        """Stores the kernel in panels, if it fits; see `matmul_cpu.to_panels`.

        Calls return the same, and nothing else may read the kernel.
        """
        is_plain = self.format is None or not (self.format.block or self.format.int8_products)
        kernel = self.kernel.get_value()
        if not is_plain or not matmul_cpu.fits_panels(kernel, self.sharding):
            return
        metadata = self.kernel.get_metadata() | {"axes": (None, *self.axes), "in_panels": True}
        if isinstance(kernel, jax.ShapeDtypeStruct):
            shape = jax.eval_shape(matmul_cpu.to_panels, kernel).shape
            panels = self.sharding.abstract(shape, metadata["axes"], kernel.dtype)
        else:
            panels = jax.block_until_ready(_to_panels(kernel))
        self.kernel = nnx.Param(panels, **metadata)


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
        return project(hidden, table, self.sharding, transposed=True, dtype=jnp.float32)

    @property
    def head(self) -> tuple[jax.Array, bool]:
        """Weights [V, D] of the output head, and that they are transposed."""
        return self.embedding[...], True

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
        return self.scale[...].astype(jnp.float32)


class UnscaledRMSNorm(RMSNorm):
    """Root-mean-square norm without a learned scale."""

    def __init__(self, width: int, eps: float, **build):
        self.width, self.eps = width, eps

    @property
    def factor(self) -> jax.Array:
        """Factor float32 [D] of a normalized row, ones."""
        return jnp.ones(self.width, jnp.float32)


class ZeroCenteredRMSNorm(RMSNorm):
    """Root-mean-square norm that multiplies by 1 + scale, in float32, as Gemma's and Qwen3.5's."""

    stddev = 0.0

    @property
    def factor(self) -> jax.Array:
        return 1.0 + self.scale[...].astype(jnp.float32)


class LowRank(nnx.Module):
    """Updates of one linear map, side by side: x @ a @ b, where a row uses its adapter's columns.

    All adapters together are two products of a few columns, whatever the number of sequences, and
    no weights are gathered. A row without an adapter gets an update of exactly 0.

    Source: Hu et al. 2021, arXiv 2106.09685.
    """

    def __init__(self, linear: Linear, ranks: Mapping[int, int]):
        """Declares the updates, given the rank of each adapter that has one, by its number."""
        rows, columns = linear.kernel.get_value().shape
        build = {"dtype": linear.dtype, "sharding": linear.sharding, "stddev": 0.0}
        # Derived, since the checkpoint of the target does not store them.
        build["is_derived"] = True
        rank = sum(ranks.values())
        self.a = parameters.declare((rows, rank), (linear.axes[0], None), **build)
        self.b = parameters.declare((rank, columns), (None, linear.axes[1]), **build)
        # Adapter of each column of a, and of each row of b.
        self.owners = tuple(number for number, rank in ranks.items() for _ in range(rank))
        self.chosen = nnx.data(None)
        self.sharding = linear.sharding

    def __call__(self, x: jax.Array) -> jax.Array | None:
        """Returns the update of each row of x [B, T, D]; None if no adapters were chosen."""
        if self.chosen is None:
            return None
        is_owner = self.chosen[..., None] == np.array(self.owners, np.int32)
        inner = jnp.where(is_owner, project(x, self.a[...], self.sharding), 0)
        return project(inner.astype(x.dtype), self.b[...], self.sharding)


def choose_adapters(module: nnx.Module, adapters: jax.Array | None) -> None:
    """Chooses the adapter of each row for all maps within a module, in place.

    Args:
      module: Module that exists only while a program is traced.
      adapters: int32 [B, T] or [B, 1]; adapter of each row, 0 for none. None leaves all updates
        out.
    """
    if adapters is None:
        return
    for _, inner in nnx.iter_modules(module):
        if isinstance(inner, LowRank):
            inner.chosen = adapters


def join(linears: Sequence[Linear]) -> Linear:
    """Returns a linear map that computes the outputs of several maps of the same input.

    With few rows, a matrix product takes as long as reading its weights, and each product has a
    fixed start-up cost: see docs/results/tpu_compile.md. Where columns are sharded, each device
    holds its shard of the first map's columns, then that of the second's, and so on, so no column
    moves to another device.

    Args:
      linears: Linear maps, with weights or abstract, for which `can_join` is true.
    """
    first, sharding = linears[0], linears[0].sharding
    kernels = [linear.kernel.get_value() for linear in linears]
    rows, columns = kernels[0].shape[0], sum(kernel.shape[1] for kernel in kernels)
    conversion = first.kernel.get_metadata().get("conversion")
    dtype = kernels[0].dtype if conversion is None else conversion.dtype
    options = {"bias": first.bias is not None, "dtype": dtype, "sharding": sharding}
    joined = Linear(rows, columns, first.axes, **options)
    if first.format is not None:
        joined.quantize(first.format, stored=conversion is None)
    if isinstance(kernels[0], jax.ShapeDtypeStruct):
        return joined
    num_shards = sharding.size(first.axes[1])
    for name in ("kernel", "kernel_scale", "bias"):
        parameter = getattr(joined, name)
        if parameter is None:
            continue
        parts = [getattr(linear, name).get_value() for linear in linears]
        values = side_by_side(num_shards, parameter.get_value().sharding)(parts)
        # Wait, so that this layer's sources are freed before the next layer is copied.
        parameter.set_value(jax.block_until_ready(values))
    return joined


def can_join(linears: Sequence[Linear]) -> bool:
    """Returns whether all maps have the same format and columns sharded over the same mesh axes.

    Maps with block scales are never joined, since a block could straddle two of them, and neither
    are maps with adapters. Either all maps have a bias or none has.
    """
    if len({linear.bias is None for linear in linears}) > 1:
        return False
    if any(linear.low_rank is not None for linear in linears):
        return False
    formats = {linear.format for linear in linears}
    if len(formats) > 1 or any(form is not None and form.block for form in formats):
        return False
    return len({linear.sharding.axes(linear.axes[1]) for linear in linears}) == 1


@functools.cache  # Layers of equal shapes share one compiled program.
def side_by_side(num_shards: int, place: jax.sharding.Sharding) -> Callable:
    """Returns a program that joins kernels, as `join` does; `place` is the result's sharding."""

    def joined(arrays):
        lead = arrays[0].shape[:-1]
        split = [array.reshape(*lead, num_shards, -1) for array in arrays]
        return jnp.concatenate(split, axis=-1).reshape(*lead, -1)

    return jax.jit(joined, out_shardings=place)
