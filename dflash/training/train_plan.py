"""Plan of a training run, computed from shapes alone, as `--dry_run` prints it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dflash.loading.decode_plan import measure, mesh_line, readable
from dflash.parallel import parameters
from dflash.training import state as states
from dflash.training.tasks import Task

_INPUTS = ("tokens", "positions", "segment_ids", "loss_mask")


@dataclasses.dataclass(frozen=True)
class TrainPlan:
    """Size, memory and programs of a training run.

    Attributes:
      memory_bytes: Bytes per device, by kind of array.
    """

    mesh: dict[str, int]
    counts: dict[str, int]
    memory_bytes: dict[str, int]
    duration: str
    programs: tuple[str, ...]
    disk: str | None

    def lines(self) -> list[str]:
        """Returns the plan as lines of text."""
        counts = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        rows = [*self.memory_bytes.items(), ("sum", sum(self.memory_bytes.values()))]
        return [
            mesh_line(self.mesh),
            f"parameters   {counts}",
            "memory per device",
            *(f"  {kind:<28}{readable(size):>12}" for kind, size in rows),
            f"duration     {self.duration}",
            *([] if self.disk is None else [f"disk         {self.disk}"]),
            f"programs     {len(self.programs)} to compile: {', '.join(self.programs)}",
        ]


def make_plan(task: Task, optimizer, *, steps: int | None) -> TrainPlan:
    """Plans a run from abstract models.

    Args:
      steps: Total optimizer steps; None if the number depends on the data.
    """
    config = task.config
    rows, length = config.train.batch_size, config.data.length
    sharding = task.learner.sharding
    _, params = states.split(task.learner)
    state = states.abstract(params, optimizer, sharding)
    frozen = task.abstract_frozen()
    counts = {"learning": parameters.count(task.learner)}
    memory = {
        "weights (float32)": measure(state.params).device_bytes,
        "gradients (float32)": measure(state.params).device_bytes,
        "optimizer": measure(state.optimizer).device_bytes,
    }
    if task.drafts:
        counts["frozen target"] = parameters.count(task.target)
        memory[f"frozen target ({config.train.dtype})"] = measure(frozen).device_bytes
    microbatch_rows = rows // config.optimizer.accumulate_steps
    residual_bytes = activation_bytes(
        task, state.params, frozen, rows=microbatch_rows, length=length
    )
    memory["activations (estimate)"] = residual_bytes // sharding.size("batch")
    duration = (
        f"{config.train.epochs:g} epochs of rows of {length} tokens"
        if steps is None
        else (f"{steps:,} steps of {rows} × {length} tokens = {steps * rows * length:,} tokens")
    )
    disk = None
    if config.train.keep_features is not None:
        size = readable(task.feature_bytes * 10**6)
        disk = f"{size} of features per million tokens, in {config.train.keep_features}"
    return TrainPlan(
        mesh=dict(sharding.mesh.shape),
        counts=counts,
        memory_bytes=memory,
        duration=duration,
        programs=_programs(task),
        disk=disk,
    )


def activation_bytes(task: Task, params: Any, frozen: Any, *, rows: int, length: int) -> int:
    """Estimates the bytes of residuals for the backward pass of `rows` rows, over all devices.

    The residuals come from tracing the loss; they include copies of the weights in the compute
    dtype. The compiler may keep fewer of them, and needs temporary buffers in addition.
    """

    def residuals(params, *inputs):
        return jax.vjp(_loss_of(task, *inputs), params)[1]

    abstract_residuals = jax.eval_shape(
        residuals, params, frozen, *_abstract_batch(task, rows, length)
    )
    held_anyway = {(x.shape, x.dtype) for x in jax.tree.leaves((params, frozen))}
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract_residuals)
        if (leaf.shape, leaf.dtype) not in held_anyway
    )


def step_flops(task: Task) -> float:
    """Returns the matmul FLOPs of a training step over all devices, traced from one row's loss.

    They include the frozen target's forward pass.
    """
    config = task.config
    params, frozen = states.split(task.learner)[1], task.abstract_frozen()
    (batch, key) = _abstract_batch(task, 1, config.data.length)
    batch = {name: batch[name] for name in _INPUTS}  # Without features, the loss computes them.

    def gradient(params, *inputs):
        return jax.grad(_loss_of(task, *inputs))(params)

    traced = jax.make_jaxpr(gradient)(params, frozen, batch, key)
    return config.train.batch_size * _product_flops(traced.jaxpr)


def _loss_of(task: Task, frozen: Any, batch: Any, key: Any) -> Callable[[Any], jax.Array]:
    return lambda params: task.loss(optax.tree.cast(params, task.dtype), frozen, batch, key)[0]


def _product_flops(jaxpr: Any) -> float:
    """Returns the matmul FLOPs of a jaxpr.

    A scan's body counts once per iteration. The body of a loop of unknown length counts once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            lhs, out = equation.invars[0].aval, equation.outvars[0].aval
            total += 2.0 * out.size * math.prod(lhs.shape[axis] for axis in contracted)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        inner = jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        )
        for body in inner:
            if hasattr(body, "jaxpr"):
                body = body.jaxpr  # Unwrap a closed jaxpr.
            if hasattr(body, "eqns"):
                total += times * _product_flops(body)
    return total


def _abstract_batch(task: Task, rows: int, length: int) -> tuple[dict[str, Any], Any]:
    def shape(*dimensions, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((rows, length, *dimensions), dtype)

    batch = dict.fromkeys(_INPUTS, shape())
    if task.drafts:
        widths = task.feature_widths.items()
        batch |= {name: shape(width, dtype=task.dtype) for name, width in widths}
    return batch, jax.eval_shape(lambda: states.step_key_base(0))


def _programs(task: Task) -> tuple[str, ...]:
    config = task.config
    names = ["step"]
    if config.evaluation.batches:
        names.append("held-out loss")
    if config.evaluation.prompts and task.drafts:
        names += ["decode loop (and a prefill per prompt bucket)", "τ of held-out answers"]
    return tuple(names)
