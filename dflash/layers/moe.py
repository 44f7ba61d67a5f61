"""Mixture of experts: a router chooses a few of many MLPs for each row."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.kernels.grouped_matmul import for_platform, grouped_matmul
from dflash.layers.cache import batch_axes
from dflash.layers.linear import Kernel, Linear, WeightFormat
from dflash.layers.mlp import Mlp, gated
from dflash.layers.products import matmul_precision
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Routing:
    """Rule by which rows are routed to experts.

    Attributes:
      num_experts: Experts per layer, E.
      experts_per_token: Experts per row, k.
      scoring: Function from logits to scores: softmax over all experts, or sigmoid of each logit.
      normalize: Normalize the weights of the chosen experts to sum to 1, before `scale`.
      num_groups: Groups of equally many experts, which are ranked by the sum of their two highest
        scores.
      groups_per_token: Best groups per row, from which its experts are chosen.
      has_correction: A learned bias is added to the scores for choosing experts, but not for their
        weights.
    """

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    has_correction: bool = False
    has_bias: bool = False


def route(
    logits: jax.Array, routing: Routing, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts from the router's logits.

    Args:
      logits: [..., E].
      correction: float32 [E]; required if `routing.has_correction`.
    Returns:
      Experts int32 [..., k], best first, and their weights float32 [..., k].
    Source: softmax from Qwen3; all else from DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """
    logits = logits.astype(jnp.float32)
    score = jax.nn.softmax if routing.scoring == "softmax" else jax.nn.sigmoid
    scores = score(logits)
    ranked = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        ranked = _keep_best_groups(ranked, routing)
    _, experts = jax.lax.top_k(ranked, routing.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if routing.normalize:
        weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
    return experts, weights * routing.scale


def _keep_best_groups(ranked: jax.Array, routing: Routing) -> jax.Array:
    """Replaces the scores of groups that are not chosen by minus infinity."""
    grouped = ranked.reshape(*ranked.shape[:-1], routing.num_groups, -1)
    best_two, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    _, groups = jax.lax.top_k(best_two.sum(axis=-1), routing.groups_per_token)
    is_kept = jax.nn.one_hot(groups, routing.num_groups, dtype=bool).any(axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)


class Router(nnx.Module):
    """Router of one layer, which chooses experts by float32 logits; replicated on all devices."""

    def __init__(self, width: int, routing: Routing, *, dtype: jnp.dtype, sharding: Sharding):
        build = {"dtype": dtype, "sharding": sharding}
        shape = (width, routing.num_experts)
        self.kernel = parameters.declare(shape, (None, None), stddev=width**-0.5, **build)
        self.e_score_correction_bias = (
            parameters.declare(
                (routing.num_experts,), (None,), dtype=jnp.float32, sharding=sharding, stddev=0.1
            )
            if routing.has_correction
            else None
        )
        self.bias = (
            parameters.declare((routing.num_experts,), (None,), stddev=0.0, **build)
            if routing.has_bias
            else None
        )
        self.routing = routing

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns experts int32 [..., k] and weights float32 [..., k] for rows x [..., D]."""
        correction = self.e_score_correction_bias
        kernel = self.kernel[...]
        precise = {"precision": matmul_precision(kernel.dtype)}
        logits = jnp.einsum(
            "...d,de->...e", x, kernel, preferred_element_type=jnp.float32, **precise
        )
        if self.bias is not None:
            logits += self.bias[...]
        return route(logits, self.routing, None if correction is None else correction[...])


class ExpertLinear(Kernel):
    """Linear maps, one per expert; kernel [E, in, out], and bias [E, out] if they have one."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        axes: tuple[str | None, str | None],
        *,
        bias: bool = False,
        **build,
    ):
        super().__init__((num_experts, in_features, out_features), ("expert", *axes), **build)
        shape, names = (num_experts, out_features), ("expert", axes[1])
        self.bias = parameters.declare(shape, names, stddev=0.0, **build) if bias else None

    def quantize(self, form: WeightFormat, *, stored: bool = False) -> None:
        """Redeclares the kernel in eight bits; see `Kernel.quantize`.

        Raises:
          ConfigError: Blocks that share a scale would straddle devices.
        """
        super().quantize(form, stored=stored)
        if form.block and "mlp" not in self.scale_axes and self.sharding.size("mlp") > 1:
            raise errors.ConfigError(
                f"mesh: expert kernels {self.kernel.get_value().shape[-2:]} have scales for "
                f"blocks of {form.block[0]} × {form.block[1]}, which do not divide over "
                f"{self.sharding.size('mlp')} devices; split experts over mesh.expert instead"
            )

    def arrays(self) -> list[tuple[jax.Array, tuple[str | None, ...]]]:
        """Returns the arrays of the maps with their logical axes: kernel, any scales, any bias."""
        arrays = [(self.kernel[...], self.axes)]
        if self.format is not None:
            arrays.append((self.kernel_scale[...], self.scale_axes))
        if self.bias is not None:
            arrays.append((self.bias[...], ("expert", self.axes[-1])))
        return arrays

    def multiply(
        self, rows: jax.Array, expert: jax.Array, sizes: jax.Array, arrays, read: float
    ) -> jax.Array:
        """Multiplies sorted rows on one device.

        Args:
          rows: Rows [R, in], sorted by expert.
          expert: int32 [R]; expert of each row, or the number of experts for none.
          sizes: int32 [E]; rows of each expert.
          read: Fraction of the experts that is expected to be read.
        Returns:
          Products [R, out], to be summed over devices if these share the inputs.
        """
        kernel, *further = arrays
        scales = further.pop(0) if self.format is not None else None
        product = grouped_matmul(
            rows,
            kernel,
            sizes,
            scales,
            block=self.format and self.format.block,
            read=read,
            implementation=for_platform(self.sharding.platform),
        )
        if self.bias is None:
            return product
        (bias,) = further
        if "mlp" in self.axes[:-1]:  # Only one of the devices that share the inputs adds it.
            bias = jnp.where(self.sharding.index("mlp") == 0, bias, 0)
        return product + jnp.pad(bias, ((0, 1), (0, 0)))[expert]


@dataclasses.dataclass(frozen=True)
class ExpertForm:
    """Form of the experts of a family.

    Attributes:
      gate: Function of (gate, up) that returns hidden rows.
      interleaved: The columns of the gate and up projections alternate in one projection, as in
        gpt-oss.
    """

    gate: Callable[[jax.Array, jax.Array], jax.Array] = gated
    interleaved: bool = False
    bias: bool = False


class Experts(nnx.Module):
    """Gated MLPs, a few of which process each row.

    Rows are sorted by expert, and each expert multiplies its own rows. Experts are sharded by the
    logical axis "expert", their hidden dimension by "mlp". Each device computes the experts that it
    holds, and an all-reduce sums the results.

    By default, the devices that share the experts of a layer hold the same rows, so only the sum is
    communicated. If rows are sharded over the same mesh axis, devices all-gather the rows first and
    reduce-scatter the sum. `sharding_rules` enables this by mapping batch and pages to the mesh
    axis of the experts too. It pays for many rows, in training or in a large batch, because
    attention is then sharded as well. A batch that does not divide over the devices, such as a
    single prompt, is replicated and needs no gather.

    Sending each row only to the devices of its k experts would move k / n as much among n devices,
    which is less if n > k, but the number of rows that a device receives would not be static.
    """

    def __init__(
        self,
        routing: Routing,
        width: int,
        hidden: int,
        form: ExpertForm = ExpertForm(),
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        build = {"bias": form.bias, "dtype": dtype, "sharding": sharding}
        count, axes = routing.num_experts, ("embed", "mlp")
        if form.interleaved:
            self.interleaved_proj = ExpertLinear(count, width, 2 * hidden, axes, **build)
        else:
            self.gate_proj = ExpertLinear(count, width, hidden, axes, **build)
            self.up_proj = ExpertLinear(count, width, hidden, axes, **build)
        self.down_proj = ExpertLinear(count, hidden, width, ("mlp", "embed"), **build)
        self.routing, self.form, self.sharding = routing, form, sharding

    def share_read(self, rows: int) -> float:
        """Returns the expected fraction of experts that are read for `rows` rows.

        It assumes that rows choose independently. Real rows choose more alike, so this is an upper
        bound.
        """
        return 1.0 - (1.0 - self.share_used) ** rows

    @property
    def share_used(self) -> float:
        """Fraction of the experts that process a row."""
        return self.routing.experts_per_token / self.routing.num_experts

    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """Runs rows through their experts.

        Args:
          x: Rows [B, T, D].
          experts: int32 [B, T, k]; experts of each row.
          weights: float32 [B, T, k]; weights of the experts' outputs.
        Returns:
          [B, T, D].
        """
        batch, _ = batch_axes(x.shape[0], self.sharding)
        rows = (batch, None, None)
        arrays = [array for linear in self._linears for array, _ in linear.arrays()]
        names = [  # Every device needs the full width of its rows.
            tuple(None if name == "embed" else name for name in axes)
            for linear in self._linears
            for _, axes in linear.arrays()
        ]
        split = self.sharding.axes("batch") if batch else ()
        exchanged = tuple(axis for axis in split if axis in self.sharding.axes("expert"))
        run = functools.partial(self._run_local, exchanged)
        run = self.sharding.map(run, [rows, rows, rows, *names], [rows])
        (out,) = run(x, experts, weights, *arrays)
        return out

    @property
    def _linears(self) -> tuple[ExpertLinear, ...]:
        """Maps from rows to hidden rows, then the map back."""
        if self.form.interleaved:
            return self.interleaved_proj, self.down_proj
        return self.gate_proj, self.up_proj, self.down_proj

    def _run_local(self, exchanged, x, experts, weights, *arrays):
        """Computes the experts that this device holds, and sums the results over all devices."""
        if exchanged:
            x, experts, weights = (
                jax.lax.all_gather(rows, exchanged, tiled=True) for rows in (x, experts, weights)
            )
        out = self._sum_local(x, experts, weights, *arrays)
        if exchanged:
            out = jax.lax.psum_scatter(out, exchanged, tiled=True)
        axes = self.sharding.axes("expert") + self.sharding.axes("mlp")
        summed_axes = tuple(axis for axis in axes if axis not in exchanged)
        return ((jax.lax.psum(out, summed_axes) if summed_axes else out).astype(x.dtype),)

    def _sum_local(self, x, experts, weights, *arrays):
        """Returns the weighted sum of the outputs of this device's experts, float32 [B, T, D]."""
        count, per_row = arrays[0].shape[0], experts.shape[-1]
        local = experts.reshape(-1) - self.sharding.index("expert") * count
        # Experts of other devices get the index `count`, so that their rows sort last.
        local = jnp.where((local >= 0) & (local < count), local, count)
        order = jnp.argsort(local, stable=True)
        sizes = jnp.bincount(local, length=count + 1)[:count].astype(jnp.int32)
        read = self.share_read(math.prod(experts.shape[:-1]))
        remaining = iter(arrays)

        def multiply(linear, rows):
            shards = list(itertools.islice(remaining, len(linear.arrays())))
            return linear.multiply(rows, local[order], sizes, shards, read)

        sorted_rows = x.reshape(-1, x.shape[-1])[order // per_row]
        *inner, down_proj = self._linears
        parts = [multiply(linear, sorted_rows) for linear in inner]
        if self.form.interleaved:
            parts = [parts[0][:, ::2], parts[0][:, 1::2]]
        products = multiply(down_proj, self.form.gate(*parts))
        by_row = products[jnp.argsort(order)].reshape(*weights.shape, -1)
        return jnp.einsum("btk,btkd->btd", weights, by_row.astype(jnp.float32))


class SparseMlp(nnx.Module):
    """Routed experts and, in some families, shared experts that process every row."""

    def __init__(
        self,
        routing: Routing,
        width: int,
        hidden: int,
        *,
        shared_hidden: int = 0,
        gates_shared: bool = False,
        form: ExpertForm = ExpertForm(),
        **build,
    ):
        """Builds an abstract layer.

        Args:
          shared_hidden: Total hidden size of the shared experts; 0 for none.
          gates_shared: Multiply the output of the shared experts by the sigmoid of a learned gate,
            one number per row.
        """
        self.gate = Router(width, routing, **build)
        self.experts = Experts(routing, width, hidden, form, **build)
        self.shared_experts = Mlp(width, shared_hidden, **build) if shared_hidden else None
        self.shared_expert_gate = (
            Linear(width, 1, ("embed", None), **build) if gates_shared else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.experts(x, *self.gate(x))
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared *= jax.nn.sigmoid(self.shared_expert_gate(x))
        return out + shared


@dataclasses.dataclass(frozen=True)
class Shares:
    """Fractions of a parameter that a forward pass touches.

    Attributes:
      used: Fraction that each row is multiplied with.
      read: Fraction that is read from memory for all rows together.
    """

    used: float
    read: float


def shares(model: nnx.Module, rows: int) -> Callable[[str], Shares]:
    """Returns a function from a parameter's dotted path to its `Shares`.

    Args:
      model: Model with or without experts; all other parameters are used and read in full.
      rows: Rows that the model processes in one forward pass.
    """
    experts = {
        ".".join(map(str, path)) + ".": module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Experts)
    }

    def of(path: str) -> Shares:
        owner = next(
            (module for prefix, module in experts.items() if path.startswith(prefix)), None
        )
        return Shares(owner.share_used, owner.share_read(rows)) if owner else Shares(1.0, 1.0)

    return of


def stacked_names(path: str, num_experts: int) -> tuple[str, ...] | None:
    """Returns the names of the tensors, one per expert, that store a parameter of `Experts`.

    Args:
      path: Dotted path of a parameter of the model.
    Returns:
      For "layers.3.mlp.experts.up_proj.kernel", the names "layers.3.mlp.experts.0.up_proj.weight"
      and so on. None if the parameter is not one of `Experts`.
    """
    layer, separator, projection = path.removesuffix(".kernel").rpartition(".experts.")
    if not separator or "." in projection:
        return None
    return tuple(f"{layer}.experts.{i}.{projection}.weight" for i in range(num_experts))
