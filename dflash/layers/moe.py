"""Mixture of experts: a router chooses a few of many mlps for each row."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.kernels.grouped_matmul import for_platform, grouped_matmul
from dflash.layers.cache import batch_axes
from dflash.layers.linear import Kernel
from dflash.layers.mlp import Mlp, gated
from dflash.layers.weight_format import WeightFormat
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a row chooses its experts.

    Attributes:
      num_experts: experts of a layer.
      experts_per_token: experts that a row goes through.
      scoring: how logits become weights: softmax over all experts, or a sigmoid of each.
      normalize: weights of the chosen experts sum to 1 (before `scale`).
      scale: factor on the weights.
      num_groups: groups of equally many experts; a row first chooses among them.
      groups_per_token: groups that stay, by the sum of the two best experts of each.
      has_correction: a learned bias is added to the scores by which experts are chosen, but not to
        their weights.
    """

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    has_correction: bool = False


def route(
    logits: jax.Array, routing: Routing, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by the logits of the router.

    Args:
      logits: [..., E].
      routing: the rule.
      correction: float32 [E], where the rule has one.
    Returns:
      experts int32 [..., k], the best first, and their weights float32 [..., k].
    Source: softmax, as in Qwen3; the rest from DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
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
    """The scores, with minus infinity in the groups that are not chosen."""
    grouped = ranked.reshape(*ranked.shape[:-1], routing.num_groups, -1)
    best_two, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    _, kept = jax.lax.top_k(best_two.sum(axis=-1), routing.groups_per_token)
    is_kept = jax.nn.one_hot(kept, routing.num_groups, dtype=bool).any(axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)


class Router(nnx.Module):
    """Logits for every expert, in float32, and the choice; small, and whole on every device."""

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
        self.routing = routing

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., D] -> experts int32 [..., k] and their weights float32 [..., k]."""
        correction = self.e_score_correction_bias
        logits = jnp.einsum(
            "...d,de->...e", x, self.kernel[...], preferred_element_type=jnp.float32
        )
        return route(logits, self.routing, None if correction is None else correction[...])


class ExpertLinear(Kernel):
    """A linear map without a bias for each expert; kernel [E, in, out]."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        axes: tuple[str | None, str | None],
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        shape = (num_experts, in_features, out_features)
        super().__init__(shape, ("expert", *axes), dtype=dtype, sharding=sharding)

    def quantize(self, form: WeightFormat, *, stored: bool = False) -> None:
        """See `Kernel.quantize`.

        Raises:
          ConfigError: blocks that share a scale would be split over devices.
        """
        super().quantize(form, stored=stored)
        if form.block and "mlp" not in self.scale_axes and self.sharding.size("mlp") > 1:
            raise errors.ConfigError(
                f"mesh: experts of width {self.kernel.get_value().shape[-2:]} have scales for "
                f"blocks of {form.block[0]} × {form.block[1]}, which do not divide over "
                f"{self.sharding.size('mlp')} devices; split experts over mesh.expert instead"
            )


class Experts(nnx.Module):
    """Gated mlps, of which each row goes through a few.

    Rows are sorted by expert, and every expert multiplies its own. Experts are split over devices
    by the axis "expert", their widths by "mlp". Every device takes those of the rows' choices that
    it holds, and what they give is summed over devices.

    How a device comes by the rows depends on whether it has them. By default all devices among
    which experts are split have the same rows: nothing is sent but the sum. Where rows are split
    too, devices gather the rows of one another before, and of the sum each gets its own rows back.
    `sharding_rules` asks for it by naming the mesh axis of experts for batch and pages as well.
    That is for many rows, in training or in a large batch, whose attention is then split too. A
    batch that does not divide, such as a single prompt, is whole everywhere and is not exchanged.

    Sending each row to the devices of its k experts alone would move k / n of that among n devices:
    less where n > k, but what a device receives has then no static size.
    """

    def __init__(
        self, routing: Routing, width: int, hidden: int, *, dtype: jnp.dtype, sharding: Sharding
    ):
        build = {"dtype": dtype, "sharding": sharding}
        count = routing.num_experts
        self.gate_proj = ExpertLinear(count, width, hidden, ("embed", "mlp"), **build)
        self.up_proj = ExpertLinear(count, width, hidden, ("embed", "mlp"), **build)
        self.down_proj = ExpertLinear(count, hidden, width, ("mlp", "embed"), **build)
        self.routing, self.sharding = routing, sharding

    def share_read(self, rows: int) -> float:
        """Expected share of the experts that so many rows touch, each choosing at random.

        Real rows agree more than that: it is an upper bound.
        """
        return 1.0 - (1.0 - self.share_used) ** rows

    @property
    def share_used(self) -> float:
        """Share of the experts that one row goes through."""
        return self.routing.experts_per_token / self.routing.num_experts

    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """Runs rows through their experts.

        Args:
          x: [B, T, D].
          experts: int32 [B, T, k].
          weights: float32 [B, T, k].
        Returns:
          [B, T, D].
        """
        batch, _ = batch_axes(x.shape[0], self.sharding)
        rows = (batch, None, None)
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        arrays = [one.kernel[...] for one in projections]
        names = [_whole_width(one.axes) for one in projections]
        if self.gate_proj.format is not None:
            arrays += [one.kernel_scale[...] for one in projections]
            names += [_whole_width(one.scale_axes) for one in projections]
        split = self.sharding.axes("batch") if batch else ()
        exchanged = tuple(axis for axis in split if axis in self.sharding.axes("expert"))
        run = functools.partial(self._run_own, exchanged)
        run = self.sharding.map(run, [rows, rows, rows, *names], [rows])
        (out,) = run(x, experts, weights, *arrays)
        return out

    def _run_own(self, exchanged, x, experts, weights, *kernels):
        """The part of one device, which holds some of the experts, summed over all devices."""
        if exchanged:
            x, experts, weights = (
                jax.lax.all_gather(rows, exchanged, tiled=True) for rows in (x, experts, weights)
            )
        out = self._sum_own(x, experts, weights, *kernels)
        if exchanged:
            out = jax.lax.psum_scatter(out, exchanged, tiled=True)
        axes = self.sharding.axes("expert") + self.sharding.axes("mlp")
        others = tuple(axis for axis in axes if axis not in exchanged)
        return ((jax.lax.psum(out, others) if others else out).astype(x.dtype),)

    def _sum_own(self, x, experts, weights, gate, up, down, *scales):
        """Float32 [B, T, D]: what the experts of this device give, weighted."""
        count, per_row = gate.shape[0], experts.shape[-1]
        own = experts.reshape(-1) - self.sharding.index("expert") * count
        own = jnp.where((own >= 0) & (own < count), own, count)  # others' come last
        order = jnp.argsort(own, stable=True)
        sizes = jnp.bincount(own, length=count + 1)[:count].astype(jnp.int32)
        of_gate, of_up, of_down = scales or (None, None, None)
        block = self.gate_proj.format and self.gate_proj.format.block
        product = functools.partial(
            grouped_matmul,
            block=block,
            read=self.share_read(math.prod(experts.shape[:-1])),
            implementation=for_platform(self.sharding.platform),
        )
        sorted_rows = x.reshape(-1, x.shape[-1])[order // per_row]
        inner = gated(
            product(sorted_rows, gate, sizes, of_gate), product(sorted_rows, up, sizes, of_up)
        )
        products = product(inner, down, sizes, of_down)
        by_row = products[jnp.argsort(order)].reshape(*weights.shape, -1)
        return jnp.einsum("btk,btkd->btd", weights, by_row.astype(jnp.float32))


def _whole_width(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Names within `Experts`, where every device has rows of the model's whole width."""
    return tuple(None if name == "embed" else name for name in axes)


class SparseMlp(nnx.Module):
    """Routed experts, and where a family has them shared ones that every row goes through."""

    def __init__(
        self,
        routing: Routing,
        width: int,
        hidden: int,
        *,
        shared_hidden: int = 0,
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        """Builds an abstract layer.

        Args:
          routing: how rows choose.
          width: of rows.
          hidden: width of each expert.
          shared_hidden: width of the shared experts together; 0 for none.
        """
        build = {"dtype": dtype, "sharding": sharding}
        self.gate = Router(width, routing, **build)
        self.experts = Experts(routing, width, hidden, **build)
        self.shared_experts = Mlp(width, shared_hidden, **build) if shared_hidden else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        out = self.experts(x, *self.gate(x))
        return out if self.shared_experts is None else out + self.shared_experts(x)


@dataclasses.dataclass(frozen=True)
class Shares:
    """What part of a weight so many rows are multiplied with, and what part is read for them."""

    used: float
    read: float


def shares(model: nnx.Module, rows: int) -> Callable[[str], Shares]:
    """The shares of the parameter at a dotted path of a model, when it runs `rows` rows at once."""
    experts = {
        ".".join(map(str, path)) + ".": module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Experts)
    }

    def of(path: str) -> Shares:
        owner = next((one for prefix, one in experts.items() if path.startswith(prefix)), None)
        return Shares(owner.share_used, owner.share_read(rows)) if owner else Shares(1.0, 1.0)

    return of


def stacked_names(path: str, num_experts: int) -> tuple[str, ...] | None:
    """Names of the tensors that a parameter of `Experts` is stored as, one an expert.

    Args:
      path: of a parameter of the model, dotted.
      num_experts: how many there are.
    Returns:
      for "layers.3.mlp.experts.up_proj.kernel" "layers.3.mlp.experts.0.up_proj.weight" and so on;
      None for the path of anything else.
    """
    layer, found, projection = path.removesuffix(".kernel").rpartition(".experts.")
    if not found or "." in projection:
        return None
    return tuple(f"{layer}.experts.{i}.{projection}.weight" for i in range(num_experts))
