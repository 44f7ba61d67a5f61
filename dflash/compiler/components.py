"""Components of a decoding cycle, and the figures of a program summed by component."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

from dflash.compiler.costs import ScheduledOperation
from dflash.compiler.hlo import Instruction
from dflash.compiler.topology import RooflineRates
from dflash.parallel.chips import Chip

ATTENTION, MLP, UNEMBED, DRAFTER, REST = (
    "target attention", "target mlp", "unembed", "drafter", "rest",
)  # fmt: skip
COMPONENTS = (ATTENTION, MLP, UNEMBED, DRAFTER, REST)

# Copies smaller than this take negligible time.
BIG_COPY_BYTES = 1 << 20
_MOVES = frozenset(("copy", "transpose"))


@dataclasses.dataclass(frozen=True)
class Component:
    """Figures of one component for a single execution of a program, per device.

    Attributes:
      flops: Floating-point operations of matmuls.
      hbm_bytes: Bytes read from and written to HBM.
      ideal_ms: Time to read every weight and context row once and to compute `flops`, at the
        chip's peak rates.
      roofline_ms: Time of all operations in sequence, each at the compiler's roofline rates.
      cycles_ms: Time by the compiler's estimate of cycles, without asynchronous copies.
      async_ms: Time of the asynchronous copies at the roofline rates.
    """

    flops: float
    hbm_bytes: float
    ideal_ms: float
    roofline_ms: float
    cycles_ms: float
    async_ms: float


def has_word(scope: str, word: str) -> bool:
    """Returns whether a path of jax scopes contains a name, also inside `jit(…)` and the like."""
    return word in re.findall(r"\w+", scope)


def component_of(scope: str) -> str:
    """Returns the component that an operation belongs to, by its jax scopes."""
    words = set(re.findall(r"\w+", scope))
    if words & {"unembed", "sample"}:
        return UNEMBED
    if "drafter" in words:
        return DRAFTER
    if "target" in words and "attention" in words:
        return ATTENTION
    if "target" in words and "mlp" in words:
        return MLP
    return REST


def summarize(
    operations: Iterable[ScheduledOperation],
    ideals: Mapping[str, float],
    chip: Chip,
    rates: RooflineRates,
) -> dict[str, Component]:
    """Sums operations by component.

    Args:
      ideals: Lower bounds on the bytes that each component reads; a missing component has none.
      chip: Chip with the peak rates, and the clock rate that converts cycles to time.
    """
    grouped: dict[str, list[ScheduledOperation]] = {name: [] for name in COMPONENTS}
    for operation in operations:
        grouped[component_of(operation.scope)].append(operation)
    return {
        name: _sum(members, ideals.get(name, 0.0), chip, rates) for name, members in grouped.items()
    }


def total(components: Iterable[Component]) -> Component:
    """Sums components, figure by figure."""
    fields = [field.name for field in dataclasses.fields(Component)]
    components = list(components)
    return Component(*(sum(getattr(part, name) for part in components) for name in fields))


def roofline_ms(operation: ScheduledOperation, rates: RooflineRates) -> float:
    """Returns the time of one execution: the larger of arithmetic and memory time, in ms."""
    return 1e3 * max(operation.flops / rates.flops_per_s, operation.hbm_bytes / rates.bytes_per_s)


def collectives(operations: Iterable[ScheduledOperation]) -> dict[str, tuple[int, int]]:
    """Returns the number of collectives and the total bytes of their results, by kind."""
    sums: dict[str, tuple[int, int]] = {}
    for operation in operations:
        if kind := operation.collective:
            count, size = sums.get(kind, (0, 0))
            # The result of an asynchronous collective lists its source before its destination.
            arrays = operation.instruction.results
            is_async = operation.is_async
            moved = arrays[:2][-1].num_bytes if is_async else operation.instruction.num_bytes
            sums[kind] = (count + operation.times, size + moved * operation.times)
    return sums


def big_copies(operations: Iterable[ScheduledOperation]) -> list[ScheduledOperation]:
    """Returns the synchronous copies and transpositions of at least `BIG_COPY_BYTES`."""
    return [
        operation
        for operation in operations
        if not operation.is_async
        and operation.instruction.num_bytes >= BIG_COPY_BYTES
        and (operation.instruction.opcode in _MOVES or _only_moves_data(operation.instruction))
    ]


def _only_moves_data(instruction: Instruction) -> bool:
    """Returns whether a fusion only moves data, judged by its name."""
    words = set(re.split(r"[-_.\d]+", instruction.name)) - {"", "fusion", "bitcast", "clone"}
    return instruction.opcode == "fusion" and bool(words) and words <= {*_MOVES, "slice", "dynamic"}


def _sum(
    operations: list[ScheduledOperation], ideal: float, chip: Chip, rates: RooflineRates
) -> Component:
    def over(value: Callable[[ScheduledOperation], float]) -> float:
        return sum(value(operation) * operation.times for operation in operations)

    flops = over(lambda operation: operation.flops)
    cycles = over(lambda operation: operation.cycles)
    return Component(
        flops=flops,
        hbm_bytes=over(lambda operation: operation.hbm_bytes),
        ideal_ms=chip.ideal_ms(flops, ideal) if ideal else 0.0,
        roofline_ms=over(lambda operation: roofline_ms(operation, rates)),
        cycles_ms=cycles / (chip.clock_ghz * 1e6) if chip.clock_ghz else 0.0,
        async_ms=over(
            lambda operation: roofline_ms(operation, rates) if operation.is_async else 0.0
        ),
    )
