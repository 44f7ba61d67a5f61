"""The compile report: the compiler's figures for a run's programs, as data and as JSON.

All of it is the compiler's estimate. Nothing here has run on a chip.
"""

import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dflash.compiler import components, costs, hlo
from dflash.compiler.components import UNEMBED, Component, Ideal
from dflash.compiler.costs import ScheduledOperation
from dflash.compiler.programs import CYCLE, CompiledProgram
from dflash.compiler.topology import RooflineRates, Topology
from dflash.config.schema import DecodeConfig
from dflash.config.tpu_schema import TpuConfig
from dflash.kernels.paged_attention import TILE_TOKENS
from dflash.parallel.chips import Chip

LABEL = "compiler estimates: nothing here was measured on a chip"


@dataclasses.dataclass(frozen=True)
class RunAssumptions:
    """What a program's loops and branches depend on.

    Attributes:
      context: tokens per sequence that attention reads.
      sampled: some sequence samples, so noise is drawn.
      filtered: by top-k, top-p or min-p too.
      shaped: penalties, biases or a least length change logits.
    """

    context: int
    sampled: bool = False
    filtered: bool = False
    shaped: bool = False

    @classmethod
    def of(cls, context: int, decode: DecodeConfig) -> "RunAssumptions":
        """That of a run which decodes as its config says."""
        filtered = decode.top_k > 0 or decode.top_p < 1 or decode.min_p > 0
        penalties = decode.presence_penalty, decode.frequency_penalty, decode.min_new_tokens
        shaped = any(penalties) or decode.repetition_penalty != 1
        return cls(context, decode.temperature > 0, filtered, shaped)

    def trips(self, loop: hlo.Instruction) -> int | None:
        """Turns of a loop that the compiler cannot count: those of attention over its context."""
        if components.has_word(loop.op_name, "attention"):
            return max(1, -(-self.context // TILE_TOKENS))
        return None

    def branch(self, conditional: hlo.Instruction) -> int | None:
        """Which branch the run takes, where a condition of the config decides."""
        if components.has_word(conditional.op_name, "if_tied"):
            return 0  # logits rarely tie where top-k and top-p end
        if components.has_word(conditional.op_name, "if_filtered"):
            return int(self.filtered)
        if components.has_word(conditional.op_name, "if_sampled"):
            return int(self.sampled)
        if components.has_word(conditional.op_name, "if_shaped"):
            return int(self.shaped)
        if components.has_word(conditional.op_name, "if_logprobs"):
            return 0
        return None


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """Figures of one program, for one device.

    Attributes:
      title: what one run of it does.
      compile_s: compile time in seconds.
      components: of one run; of a loop, of one turn.
      once: outside of the loop, once per dispatch of up to `turns` turns.
      turns: see there.
      collectives: by kind, how many and the bytes of their results.
      copies: those of a MiB and more inside the loop: name, times, bytes, milliseconds by cycles.
      kernels: custom calls by name, and how often each runs; the compiler gives them no cycles.
      temporary_bytes: beside arguments and results.
      code_bytes: of the program itself.
      compiler: its own totals, loops and branches counted once each.
    """

    title: str
    compile_s: float
    components: Mapping[str, Component]
    once: Component
    turns: int
    collectives: Mapping[str, tuple[int, int]]
    copies: Sequence[tuple[str, int, int, float]]
    kernels: Mapping[str, int]
    temporary_bytes: int
    code_bytes: int
    compiler: Mapping[str, float]

    @property
    def total(self) -> Component:
        """Of all components."""
        return components.total(self.components.values())


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """A run on a topology.

    Attributes:
      topology: the machine.
      mesh: devices by mesh axis.
      rates: of the compiler's roofline.
      memory: bytes on each device by kind.
      capacity_bytes: of each device.
      refused: the compiler's message about a program that does not fit, or None.
      programs: by name.
    """

    topology: Topology
    mesh: Mapping[str, int]
    rates: RooflineRates
    memory: Mapping[str, int]
    capacity_bytes: float
    refused: str | None
    programs: Mapping[str, ProgramReport]

    @property
    def used_bytes(self) -> int:
        """On each device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the run does, by what the compiler asks for."""
        return self.refused is None and self.used_bytes <= self.capacity_bytes

    def exceeded_budgets(self, tpu: TpuConfig) -> list[str]:
        """A line for each limit that is passed."""
        chip = self.topology.chip
        lines = []
        if not self.fits:
            reason = (
                self.refused
                or f"{self.used_bytes / 1e9:.2f} GB of {self.capacity_bytes / 1e9:.2f} GB a device"
            )
            lines.append(f"does not fit into the memory of {self.topology.name}: {reason}")
        used_gb = self.used_bytes * chip.devices / 1e9
        if tpu.max_hbm_gb is not None and used_gb > tpu.max_hbm_gb:
            lines.append(f"tpu.max_hbm_gb: {used_gb:.2f} GB a chip, over {tpu.max_hbm_gb}")
        cycle = self.programs.get(CYCLE)
        if tpu.max_cycle_ms is not None and cycle is not None:
            took = cycle.total.cycles_ms
            if took > tpu.max_cycle_ms:
                lines.append(f"tpu.max_cycle_ms: {took:.3f} ms by cycles, over {tpu.max_cycle_ms}")
        return lines


def examine(
    program: CompiledProgram, assumptions: RunAssumptions, chip: Chip, rates: RooflineRates
) -> ProgramReport:
    """Reads a compiled program.

    Args:
      program: compiled for a TPU.
      assumptions: what its loops and branches depend on.
      chip: that it was compiled for.
      rates: of the compiler's roofline.
    """
    module = hlo.parse(program.compiled.as_text())
    found = costs.operations(module, trips=assumptions.trips, branch=assumptions.branch)
    # Of a program that is a loop, a turn of the loop is what counts.
    inside = [one for one in found if one.loops or not program.is_loop]
    around = [one for one in found if not one.loops and program.is_loop]
    memory, analysis = program.compiled.memory_analysis(), program.compiled.cost_analysis()
    return ProgramReport(
        title=program.title,
        compile_s=program.seconds,
        components=components.summarize(inside, _ideals(program, inside), chip, rates),
        once=components.total(components.summarize(around, {}, chip, rates).values()),
        turns=program.turns,
        collectives=components.collectives(inside),
        copies=[_copy(one, chip) for one in components.big_copies(inside)],
        kernels=_kernels(inside),
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        compiler={
            "flops": analysis.get("flops", 0.0),
            "bytes": analysis.get("bytes accessed", 0.0),
            "optimal_ms": 1e3 * analysis.get("optimal_seconds", 0.0),
        },
    )


def to_json(report: CompileReport) -> dict[str, Any]:
    """The report as plain dicts, lists and numbers; times in ms, sizes in bytes, per device."""
    chip = report.topology.chip
    return {
        "label": LABEL,
        "topology": report.topology.name,
        "slices": report.topology.slices,
        "chips": report.topology.num_chips,
        "devices_per_chip": chip.devices,
        "mesh": dict(report.mesh),
        "chip": dataclasses.asdict(chip) | {"ridge_rows": chip.ridge_rows},
        "versions": {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")},
        "roofline_rates": dataclasses.asdict(report.rates),
        "memory_bytes": dict(report.memory),
        "capacity_bytes": report.capacity_bytes,
        "fits": report.fits,
        "refused": report.refused,
        "programs": {
            name: dataclasses.asdict(one) | {"total": dataclasses.asdict(one.total)}
            for name, one in report.programs.items()
        },
    }


def _ideals(program: CompiledProgram, operations: Sequence[ScheduledOperation]) -> dict[str, Ideal]:
    """The program's, with the output head counted as often as it is read."""
    head = program.ideals.get(UNEMBED, Ideal(0)).num_bytes
    reads = sum(
        one.times
        for one in operations
        if head and one.read_bytes > head / 2 and components.component_of(one.scope) == UNEMBED
    )
    return {**program.ideals, UNEMBED: Ideal(head * max(reads, 1))}


def _copy(one: ScheduledOperation, chip: Chip) -> tuple[str, int, int, float]:
    took = one.cycles / (chip.clock_ghz * 1e6) if chip.clock_ghz else 0.0
    return one.instruction.name, one.times, one.instruction.num_bytes, took


def _kernels(operations: Sequence[ScheduledOperation]) -> dict[str, int]:
    """Pallas kernels by the name of their call, numbers cut off."""
    found: dict[str, int] = {}
    for one in operations:
        if one.instruction.opcode == "custom-call" and _is_kernel(one.instruction):
            name = re.sub(r"(\.\d+)+$", "", one.instruction.name)
            found[name] = found.get(name, 0) + one.times
    return found


def _is_kernel(instruction: hlo.Instruction) -> bool:
    return 'custom_call_target="tpu_custom_call"' in instruction.attributes
