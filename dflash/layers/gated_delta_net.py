"""Gated DeltaNet: linear attention with a recurrent state instead of a cache of keys and values.

Source: Yang et al. 2024, arXiv 2412.06464, in the form of Qwen3-Next and Qwen3.5.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.kernels import delta_block, gated_delta, implementation
from dflash.kernels.delta_block import Heads
from dflash.kernels.gated_delta import last_rows
from dflash.layers import linear
from dflash.layers.attention import Attend
from dflash.layers.cache import batch_axes
from dflash.layers.linear import Linear, RMSNorm
from dflash.layers.products import finish
from dflash.layers.recurrent_state import PendingState, RecurrentSpec, RecurrentState, block_names
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """Sizes of a gated DeltaNet layer; `Qwen3NextArchitecture` describes the fields."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @property
    def key_size(self) -> int:
        """Elements of all keys of a row."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Elements of all values of a row."""
        return self.linear_num_value_heads * self.linear_value_head_dim


class GatedDeltaNet(nnx.Module):
    """Layer whose context is a state per head, which every row decays, corrects and reads.

    Each device computes its own heads from the projections on, so only the output projection
    communicates.
    """

    # The size of the context does not matter to a row.
    flops_per_pair = 0

    def __init__(
        self, width: int, shape: DeltaShape, *, eps: float, dtype: jnp.dtype, sharding: Sharding
    ):
        """Builds abstract projections; raises ConfigError if devices cannot divide the heads."""
        # Columns would divide even where heads do not, and a device computes whole heads.
        sharding.named((shape.linear_num_key_heads,), ("heads",))
        build = {"dtype": dtype, "sharding": sharding}
        heads, columns = shape.linear_num_value_heads, ("embed", "heads")
        self.q_proj = Linear(width, shape.key_size, columns, **build)
        self.k_proj = Linear(width, shape.key_size, columns, **build)
        self.v_proj = Linear(width, shape.value_size, columns, **build)
        self.z_proj = Linear(width, shape.value_size, columns, **build)
        # Too small and too sensitive to be quantized, so their names do not end in "_proj".
        self.b = Linear(width, heads, columns, **build)
        self.a = Linear(width, heads, columns, **build)
        self.q_conv = self._declare_conv(shape, shape.key_size, build)
        self.k_conv = self._declare_conv(shape, shape.key_size, build)
        self.v_conv = self._declare_conv(shape, shape.value_size, build)
        wide = {"dtype": jnp.float32, "sharding": sharding}
        self.A_log = parameters.declare((heads,), ("heads",), stddev=1.0, offset=-1.0, **wide)
        self.dt_bias = parameters.declare((heads,), ("heads",), stddev=1.0, **wide)
        self.norm = RMSNorm(shape.linear_value_head_dim, eps, **build)
        self.out_proj = Linear(shape.value_size, width, ("heads", "embed"), **build)
        self.products = ("q_proj", "k_proj", "v_proj", "z_proj")
        self.shape, self.dtype, self.sharding = shape, jnp.dtype(dtype), sharding

    @staticmethod
    def _declare_conv(shape: DeltaShape, channels: int, build) -> nnx.Param:
        sizes = channels, 1, shape.linear_conv_kernel_dim
        return parameters.declare(sizes, ("heads", None, None), stddev=sizes[-1] ** -0.5, **build)

    def cache_spec(self) -> RecurrentSpec:
        """Returns the state that the layer keeps for each sequence."""
        shape = self.shape
        return RecurrentSpec(
            heads=shape.linear_num_value_heads,
            key_width=shape.linear_key_head_dim,
            value_width=shape.linear_value_head_dim,
            num_rows=shape.linear_conv_kernel_dim - 1,
            channels=2 * shape.key_size + shape.value_size,
            dtype=self.dtype,
        )

    def project(self, x: jax.Array, angles) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        """Projects rows [B, T, D].

        Returns:
          Queries, keys, values and output gates, in one array [B, T, ·] or in four; rates and
          decays [B, T, V], before their activations.
        """
        del angles  # Positions matter only through the decay.
        products = tuple(finish(getattr(self, name)(x), self.sharding) for name in self.products)
        return products, self.b(x), self.a(x)

    def attend_state(
        self, state: RecurrentState, tree_mask: jax.Array | None, count: jax.Array | None
    ) -> Attend:
        """Returns linear attention of new rows to the state and to one another.

        Args:
          tree_mask: bool [B, T, T]; new rows that each new row sees. None is causal.
          count: int32 [B]; new rows of a chain to commit at once. None if the rows are verified
            first.
        Returns:
          Attention whose auxiliary result is the new `RecurrentState`, or a `PendingState`.
        """
        batch, _ = batch_axes(state.rows.shape[0], self.sharding)
        heads = batch, None, "heads"
        memory = batch, "heads", None, None

        if count is not None:

            def attend(*projected):
                names, results = [memory, heads, (batch,)], [heads, memory, heads]
                prefill = functools.partial(_prefill, eps=self.norm.eps)
                run = self._map(batch, prefill, names, results)
                attended, *new = run(*projected, state.memory, state.rows, count)
                return attended, RecurrentState(*new)

            return attend

        def attend(*projected):
            names = [memory, heads, (batch, None, None)]
            verify = functools.partial(
                _verify,
                eps=self.norm.eps,
                implementation=implementation.for_platform(self.sharding.platform),
            )
            run = self._map(batch, verify, names, [heads, *block_names(batch)])
            attended, *block, rows = run(*projected, state.memory, state.rows, tree_mask)
            return attended, PendingState(state, gated_delta.Block(*block), rows)

        return attend

    def attend_packed(self, segment_ids: jax.Array) -> Attend:
        """Returns linear attention within documents, from empty states; see `Attention`."""
        batch, _ = batch_axes(segment_ids.shape[0], self.sharding)
        widths = self.shape.linear_key_head_dim, self.shape.linear_value_head_dim
        function = functools.partial(_run_packed, widths=widths, eps=self.norm.eps)
        run = self._map(batch, function, [(batch, None)], [(batch, None, "heads")])

        def attend(*projected):
            return (*run(*projected, segment_ids), None)

        return attend

    def output(self, attended: jax.Array) -> jax.Array:
        """Projects gated outputs [B, T, V · dv] to rows [B, T, D]."""
        return self.out_proj(attended)

    def join_projections(self) -> None:
        """Joins the projections to queries, keys, values and gates; see `linear.join`."""
        maps = [getattr(self, name) for name in self.products]
        if len(maps) > 1 and linear.can_join(maps):
            self.qkvz_proj = linear.join(maps)
            for name in self.products:
                delattr(self, name)
            self.products = ("qkvz_proj",)

    def _map(self, batch, function, names, results):
        """Returns a function of projected rows and further arrays, on each device's heads.

        Args:
          batch: Logical axis of the sequences.
          function: Function (Heads, *arrays) of a device's heads.
          names: Logical axes of the further arrays.
          results: Logical axes of the results.
        """
        convs = [self.q_conv[...], self.k_conv[...], self.v_conv[...]]
        weights = convs, self.A_log[...], self.dt_bias[...], self.norm.factor
        of_weights = [("heads", None, None), ("heads",), ("heads",), (None,)]
        heads = batch, None, "heads"

        def local(products, b, a, convs, a_log, dt_bias, scale, *arrays):
            return function(_split(products, b, a, convs, a_log, dt_bias, scale), *arrays)

        mapped = self.sharding.map(local, [heads, heads, heads, *of_weights, *names], results)
        return lambda products, b, a, *arrays: mapped(products, b, a, *weights, *arrays)


def _split(products, b, a, convs, a_log, dt_bias, scale) -> Heads:
    """Joins a device's projections, and applies the activations of rates and decays."""
    log_decay = -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    rows = jnp.concatenate(products, axis=-1)
    return Heads(rows, log_decay, beta, jnp.concatenate(convs)[:, 0], scale)


def _verify(heads: Heads, memory, before, ancestry, *, eps, implementation):
    """Returns gated outputs of rows that are not committed yet, their block, and their rows."""
    outputs, block = delta_block.verify_block(
        heads, memory, before, ancestry, eps=eps, implementation=implementation
    )
    return outputs, *block, heads.rows


def _prefill(heads: Heads, memory, before, count, *, eps):
    """Returns gated outputs of rows of which `count` are committed, and the new state."""
    committed = (jnp.arange(heads.rows.shape[1]) < count[:, None])[..., None]
    outputs, memory = gated_delta.scan_blocks(
        *delta_block.convolve(heads, before, memory.shape[2:]),
        jnp.where(committed, heads.log_decay, 0),
        jnp.where(committed, heads.beta, 0),
        memory,
    )
    rows = heads.rows[..., : before.shape[-1]]
    return delta_block.gated(heads, outputs, eps), memory, last_rows(before, rows, count)


def _run_packed(heads: Heads, segment_ids, *, widths, eps):
    """Returns gated outputs of packed documents."""
    batch, channels = heads.rows.shape[0], heads.conv.shape[0]
    before = jnp.zeros((batch, heads.conv.shape[1] - 1, channels), heads.rows.dtype)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    projected = delta_block.convolve(heads, before, widths, segment_ids=segment_ids)
    state = jnp.zeros((batch, heads.beta.shape[-1], *widths), jnp.float32)
    log_decay = jnp.where(begins[..., None], gated_delta.FORGET, heads.log_decay)
    outputs, _ = gated_delta.scan_blocks(*projected, log_decay, heads.beta, state)
    return (delta_block.gated(heads, outputs, eps),)
