"""Costs of a cycle by strategy and batch size, and where drafting begins to pay.

A strategy pays where its mean acceptance length, τ, exceeds the ratio of its cycle to one of plain
decoding. Nothing was measured on a chip. Host time is neglected, because the loop over cycles runs
on the device.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from dflash.compiler import components
from dflash.compiler.components import ATTENTION, DRAFTER, MLP, UNEMBED
from dflash.compiler.costs import ScheduledOperation
from dflash.compiler.topology import RooflineRates
from dflash.parallel.chips import Chip

# Bottlenecks of an operation in the roofline model: reading weights, reading the output head and
# writing logits, reading the context, arithmetic, and any other memory traffic.
WEIGHTS, HEAD, CONTEXT, ARITHMETIC, REST = LIMITS = (
    "weights", "output head", "context", "arithmetic", "rest",
)  # fmt: skip
PLAIN = "plain"  # Name of decoding without drafts.
# Name prefixes of the kernels whose cost is proportional to the context.
_ATTENTION_KERNELS = ("paged_attention", "block_attention", "latent_attention")
_WINDOW = re.compile(r"_w(\d+)")  # The window of such a kernel, in its name.
_LAYER_SCOPES = "attention", "mlp"


@dataclasses.dataclass(frozen=True)
class CompiledCost:
    """Time of one cycle of the whole batch, per device.

    Attributes:
      limits: Roofline time in ms, summed over operations by their bottleneck; see `LIMITS`.
      cycles_ms: Time by the compiler's cycles in ms. Kernels, which have none, count by roofline.
    """

    limits: Mapping[str, float]
    cycles_ms: float

    @property
    def roofline_ms(self) -> float:
        """Returns the time of all operations in sequence by the compiler's roofline, in ms."""
        return sum(self.limits.values())

    @property
    def bottleneck(self) -> tuple[str, float]:
        """Returns the dominant bottleneck and its fraction of the roofline time."""
        name = max(self.limits, key=self.limits.get)
        return name, self.limits[name] / self.roofline_ms

    def plus(self, other: "CompiledCost", times: float) -> "CompiledCost":
        """Returns `self + times * other`."""
        names = {**self.limits, **other.limits}
        return CompiledCost(
            {
                name: self.limits.get(name, 0.0) + times * other.limits.get(name, 0.0)
                for name in names
            },
            self.cycles_ms + times * other.cycles_ms,
        )


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Memory use of each device, linear in the context length.

    Attributes:
      fixed: Bytes of weights, temporaries, programs and state that do not depend on the context.
      per_token: Bytes that each token of context adds to the caches of all sequences together.
    """

    fixed: float
    per_token: float

    def at(self, context: int) -> float:
        """Returns the bytes with `context` tokens in each sequence."""
        return self.fixed + context * self.per_token


@dataclasses.dataclass(frozen=True)
class StrategyPoint:
    """Compiled cost of one strategy at one batch size.

    It is linear in the context length, but for layers with a window, which is linear up to there.

    Attributes:
      strategy: Name of the strategy.
      batch: Number of sequences.
      rows: Rows per sequence that the target verifies.
      fixed: Cost of a cycle with an empty context.
      per_token: Cost that each token of context adds.
      memory: Memory use of each device.
      in_windows: Cost that each token of context adds to draft layers with a window, up to the
        window, by window.
    """

    strategy: str
    batch: int
    rows: int
    fixed: CompiledCost
    per_token: CompiledCost
    memory: DeviceMemory
    in_windows: Mapping[int, CompiledCost] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns a point from the JSON values of its fields."""
        fields = {
            "fixed": CompiledCost(**value["fixed"]),
            "per_token": CompiledCost(**value["per_token"]),
            "memory": DeviceMemory(**value["memory"]),
            "in_windows": {
                int(window): CompiledCost(**cost) for window, cost in value["in_windows"].items()
            },
        }
        return cls(**value | fields)

    def cost(self, context: int) -> CompiledCost:
        """Returns the cost of a cycle with `context` tokens in each sequence."""
        total = self.fixed.plus(self.per_token, context)
        for window, per_token in self.in_windows.items():
            total = total.plus(per_token, min(context, window))
        return total


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Costs of several strategies at several batch sizes.

    Attributes:
      points: Costs of plain decoding and of every strategy, by name and batch size.
      capacity_bytes: Memory of a device in bytes.
    """

    points: Mapping[tuple[str, int], StrategyPoint]
    capacity_bytes: float

    def fits(self, point: StrategyPoint, context: int) -> bool:
        """Returns whether a strategy fits in device memory."""
        return point.memory.at(context + point.rows) <= self.capacity_bytes

    def over_plain(self, point: StrategyPoint, context: int) -> float:
        """Returns a cycle's time over plain decoding's, by roofline: the τ that pays."""
        plain = self.points[PLAIN, point.batch].cost(context)
        return point.cost(context).roofline_ms / plain.roofline_ms


@dataclasses.dataclass(frozen=True)
class LayerRepeats:
    """Ratio of all layers to compiled layers, by which the costs of layers are multiplied.

    Attributes:
      target: Ratio for the layers of the target.
      drafter: Ratio for the layers of the drafter.
    """

    target: float = 1.0
    drafter: float = 1.0

    def of(self, scope: str) -> float:
        """Returns the factor by which an operation with these jax scopes is multiplied."""
        part = components.component_of(scope)
        if part in (ATTENTION, MLP):
            return self.target
        layer = part == DRAFTER and any(components.has_word(scope, word) for word in _LAYER_SCOPES)
        return self.drafter if layer else 1.0


def cost_of(
    operations: Iterable[ScheduledOperation],
    rates: RooflineRates,
    chip: Chip,
    *,
    fill: float,
    repeats: LayerRepeats,
) -> CompiledCost:
    """Sums the operations of a cycle by bottleneck.

    Args:
      operations: Operations of one cycle.
      rates: Rates of the compiler's roofline.
      chip: Chip with the clock rate that converts cycles to time.
      fill: Filled fraction of the caches, for which the cost of attention kernels is scaled.
      repeats: Ratios by which the costs of layers are multiplied.
    """
    limits, cycles_ms = dict.fromkeys(LIMITS, 0.0), 0.0
    for operation in operations:
        scale = repeats.of(operation.scope) * (fill if _reads_context(operation) else 1)
        times = operation.times * scale
        roofline_ms = times * components.roofline_ms(operation, rates)
        limits[_limit(operation, rates)] += roofline_ms
        if operation.cycles and chip.clock_ghz:
            cycles_ms += times * operation.cycles / (chip.clock_ghz * 1e6)
        elif operation.instruction.opcode == "custom-call" and chip.clock_ghz:
            cycles_ms += roofline_ms
    return CompiledCost(limits, cycles_ms)


def by_window(operations: Iterable[ScheduledOperation]) -> dict[int, list[ScheduledOperation]]:
    """Returns the kernels that read the context through a window, by window."""
    kernels: dict[int, list[ScheduledOperation]] = {}
    for operation in filter(_reads_context, operations):
        window = _WINDOW.search(operation.instruction.name)
        if window:
            kernels.setdefault(int(window[1]), []).append(operation)
    return kernels


def _limit(operation: ScheduledOperation, rates: RooflineRates) -> str:
    if operation.flops / rates.flops_per_s > operation.hbm_bytes / rates.bytes_per_s:
        return ARITHMETIC
    if _reads_context(operation):
        return CONTEXT
    component = components.component_of(operation.scope)
    if component == UNEMBED:
        return HEAD
    return WEIGHTS if component in (ATTENTION, MLP, DRAFTER) else REST


def _reads_context(operation: ScheduledOperation) -> bool:
    instruction = operation.instruction
    return instruction.opcode == "custom-call" and instruction.name.startswith(_ATTENTION_KERNELS)
