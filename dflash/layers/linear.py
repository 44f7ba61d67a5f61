"""Linear maps, embeddings and norms."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.kernels.split_heads import rms_norm
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


class Linear(nnx.Module):
    """x @ kernel without a bias.

    The kernel is stored [in, out], the transpose of a checkpoint's `weight`: rows of x then stream
    against contiguous columns, 1.7 times faster at 16 rows on a CPU.
    """

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
        self.kernel = parameters.declare(
            (in_features, out_features),
            axes,
            dtype=dtype,
            sharding=sharding,
            stddev=1 / math.sqrt(in_features) if stddev is None else stddev,
        )
        self.axes = axes
        self.sharding = sharding

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]."""
        return _project(x, self.kernel[...], self.sharding)

    def attend(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 logits [..., V], for a kernel that is an output head."""
        return _project(hidden, self.kernel[...], self.sharding, dtype=jnp.float32)


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
    if not isinstance(kernels[0], jax.ShapeDtypeStruct):
        shares, place = sharding.size(first.axes[1]), joined.kernel.get_value().sharding
        values = _side_by_side(shares, place)(kernels)
        # Otherwise the next layer's copy would be made before this one's sources are freed.
        joined.kernel.set_value(jax.block_until_ready(values))
    return joined


def can_join(linears: Sequence[Linear]) -> bool:
    """Whether the columns of all are split over the same mesh axes."""
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
    """Keeps a CPU from holding a second, float32 copy of all bfloat16 weights at once.

    A CPU multiplies bfloat16 as float32. XLA would widen every matrix ahead of time, and outside
    of the decode loop: three times the memory of the weights. Made to depend on x, a matrix is
    widened when its product is due. Other platforms multiply bfloat16 and are left alone. (Inside
    a loop, XLA must also be kept from moving the widening out; see `Engine`.)

    Args:
      x: what the weights are about to be multiplied with.
      weights: returned as they are, bit for bit, unless x begins with a NaN.
      sharding: says what this runs on.
    """
    if sharding.platform != "cpu" or weights.dtype != jnp.bfloat16:
        return weights
    # XLA sees through simpler dependencies and removes them.
    first = x.reshape(-1)[0]
    return jnp.where(first != first, jnp.nan, weights)
