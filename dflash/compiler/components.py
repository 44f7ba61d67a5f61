"""Attributes the operations of a program to the parts of a cycle, and sums them up."""

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

# Smaller copies take negligible time.
BIG_COPY_BYTES = 1 << 20
_MOVES = frozenset(("copy", "transpose"))


@dataclasses.dataclass(frozen=True)
class Ideal:
    """The least that a component reads on one device: each weight and each context row once.

    Attributes:
      num_bytes: to be read.
    """

    num_bytes: float


@dataclasses.dataclass(frozen=True)
class Component:
    """Figures of one component for one run of a program, on one device.

    Attributes:
      flops: of matrix products.
      hbm_bytes: read and written.
      ideal_ms: time of `Ideal` at the chip's peak rates.
      roofline_ms: each operation at the rates of the compiler's roofline, one after the other.
      cycles_ms: the compiler's estimate of cycles; asynchronous copies count nothing.
      async_ms: those copies, at the roofline's rate.
    """

    flops: float
    hbm_bytes: float
    ideal_ms: float
    roofline_ms: float
    cycles_ms: float
    async_ms: float


def has_word(scope: str, word: str) -> bool:
    """Whether a jax scope is of this name; transformations wrap names in others."""
    return word in re.findall(r"\w+", scope)


def component_of(scope: str) -> str:
    """Which component the jax scopes of an operation belong to."""
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
    ideals: Mapping[str, Ideal],
    chip: Chip,
    rates: RooflineRates,
) -> dict[str, Component]:
    """Sums operations by component.

    Args:
      operations: of the program, or of its loop.
      ideals: by component; zero where missing.
      chip: its peaks, and the clock that turns cycles into time.
      rates: of the compiler's roofline.
    """
    grouped: dict[str, list[ScheduledOperation]] = {name: [] for name in COMPONENTS}
    for one in operations:
        grouped[component_of(one.scope)].append(one)
    return {
        name: _sum(found, ideals.get(name, Ideal(0)), chip, rates)
        for name, found in grouped.items()
    }


def total(components: Iterable[Component]) -> Component:
    """The sum of all."""
    fields = [field.name for field in dataclasses.fields(Component)]
    components = list(components)
    return Component(*(sum(getattr(one, name) for one in components) for name in fields))


def scaled(component: Component, factor: float) -> Component:
    """The component run `factor` times."""
    return Component(*(factor * value for value in dataclasses.astuple(component)))


def roofline_ms(one: ScheduledOperation, rates: RooflineRates) -> float:
    """One run of an operation, as long as the slower of arithmetic and memory takes."""
    return 1e3 * max(one.flops / rates.flops_per_s, one.hbm_bytes / rates.bytes_per_s)


def collectives(operations: Iterable[ScheduledOperation]) -> dict[str, tuple[int, int]]:
    """By kind: how many run, and the bytes of their results on a device, all together."""
    found: dict[str, tuple[int, int]] = {}
    for one in operations:
        if kind := one.collective:
            count, size = found.get(kind, (0, 0))
            # An asynchronous one's result names its source first.
            arrays = one.instruction.results
            own = arrays[:2][-1].num_bytes if one.is_async else one.instruction.num_bytes
            found[kind] = (count + one.times, size + own * one.times)
    return found


def big_copies(operations: Iterable[ScheduledOperation]) -> list[ScheduledOperation]:
    """Copies and transpositions, of a MiB and more, that other operations wait for."""
    return [
        one
        for one in operations
        if not one.is_async
        and one.instruction.num_bytes >= BIG_COPY_BYTES
        and (one.instruction.opcode in _MOVES or _names_a_move(one.instruction))
    ]


def _names_a_move(instruction: Instruction) -> bool:
    """Whether a fusion only moves data, which its name tells."""
    words = set(re.split(r"[-_.\d]+", instruction.name)) - {"", "fusion", "bitcast", "clone"}
    return instruction.opcode == "fusion" and bool(words) and words <= {*_MOVES, "slice", "dynamic"}


def _sum(
    operations: list[ScheduledOperation], ideal: Ideal, chip: Chip, rates: RooflineRates
) -> Component:
    def over(value: Callable[[ScheduledOperation], float]) -> float:
        return sum(value(one) * one.times for one in operations)

    flops = over(lambda one: one.flops)
    return Component(
        flops=flops,
        hbm_bytes=over(lambda one: one.hbm_bytes),
        ideal_ms=chip.ideal_ms(flops, ideal.num_bytes) if ideal.num_bytes else 0.0,
        roofline_ms=over(lambda one: roofline_ms(one, rates)),
        cycles_ms=over(lambda one: one.cycles) / (chip.clock_ghz * 1e6) if chip.clock_ghz else 0.0,
        async_ms=over(lambda one: roofline_ms(one, rates) if one.is_async else 0.0),
    )
