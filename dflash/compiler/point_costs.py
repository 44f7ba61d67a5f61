"""Costs of a whole cycle by bottleneck, from the operations of a cycle with few layers."""

import dataclasses
import re
from collections.abc import Iterable

from dflash.compiler import components, forecast
from dflash.compiler.components import ATTENTION, DRAFTER, MLP, UNEMBED
from dflash.compiler.costs import ScheduledOperation
from dflash.compiler.forecast import CompiledCost
from dflash.compiler.topology import RooflineRates
from dflash.parallel.chips import Chip

# Name prefixes of the kernels whose cost is proportional to the context.
_ATTENTION_KERNELS = ("paged_attention", "block_attention", "latent_attention")
_WINDOW = re.compile(r"_w(\d+)")  # The window of such a kernel, in its name.
_LAYER_SCOPES = "attention", "mlp"


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
    limits, cycles_ms = dict.fromkeys(forecast.LIMITS, 0.0), 0.0
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
    found: dict[int, list[ScheduledOperation]] = {}
    for operation in filter(_reads_context, operations):
        window = _WINDOW.search(operation.instruction.name)
        if window:
            found.setdefault(int(window[1]), []).append(operation)
    return found


def collectives(
    operations: Iterable[ScheduledOperation], repeats: LayerRepeats
) -> dict[str, tuple[float, float]]:
    """Returns the number of collectives in a whole cycle and their bytes, by kind."""
    sums: dict[str, tuple[float, float]] = {}
    for operation in operations:
        times = repeats.of(operation.scope)
        for kind, (count, size) in components.collectives([operation]).items():
            total_count, total_size = sums.get(kind, (0, 0))
            sums[kind] = total_count + times * count, total_size + times * size
    return sums


def _limit(operation: ScheduledOperation, rates: RooflineRates) -> str:
    if operation.flops / rates.flops_per_s > operation.hbm_bytes / rates.bytes_per_s:
        return forecast.ARITHMETIC
    if _reads_context(operation):
        return forecast.CONTEXT
    component = components.component_of(operation.scope)
    if component == UNEMBED:
        return forecast.HEAD
    return forecast.WEIGHTS if component in (ATTENTION, MLP, DRAFTER) else forecast.REST


def _reads_context(operation: ScheduledOperation) -> bool:
    instruction = operation.instruction
    return instruction.opcode == "custom-call" and instruction.name.startswith(_ATTENTION_KERNELS)
