"""Compile report of a run: the compiler's figures for its programs, as JSON and as text.

All figures are estimates of the compiler. Nothing was measured on a chip.
"""

import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dflash.compiler import components, costs, hlo
from dflash.compiler.components import UNEMBED, Component
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
    """Assumptions about a run, which determine trip counts and branches.

    Attributes:
      context: Tokens per sequence that attention reads.
      sampled: At least one sequence is sampled rather than decoded greedily.
      filtered: Sampling uses top-k, top-p or min-p.
      shaped: Penalties, biases or a minimum length change the logits.
    """

    context: int
    sampled: bool = False
    filtered: bool = False
    shaped: bool = False

    @classmethod
    def of(cls, context: int, decode: DecodeConfig) -> "RunAssumptions":
        """Derives the assumptions from a decoding config."""
        filtered = decode.top_k > 0 or decode.top_p < 1 or decode.min_p > 0
        penalties = decode.presence_penalty, decode.frequency_penalty, decode.min_new_tokens
        shaped = any(penalties) or decode.repetition_penalty != 1
        return cls(context, decode.temperature > 0, filtered, shaped)

    def trips(self, loop: hlo.Instruction) -> int | None:
        """Returns the trip count of a loop of attention over the context; None for others."""
        if components.has_word(loop.op_name, "attention"):
            return max(1, -(-self.context // TILE_TOKENS))
        return None

    def branch(self, conditional: hlo.Instruction) -> int | None:
        """Returns the index of the branch that runs; None if the config does not determine it."""
        # The innermost scopes come first: "if_filtered" is nested in "if_sampled".
        branches = {
            "if_tied": False,  # Ties at the cutoff of top-k or top-p are rare.
            "if_filtered": self.filtered,
            "if_sampled": self.sampled,
            "if_shaped": self.shaped,
            "if_logprobs": False,
            # The branches of `cycle.conclude`: greedy, with noise if it pays, from all logits.
            "if_logits": 2 if self.filtered or self.shaped else self.sampled,
        }
        for scope, taken in branches.items():
            if components.has_word(conditional.op_name, scope):
                return min(int(taken), len(conditional.called["branch_computations"]) - 1)
        return None


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """Figures of one program, per device.

    Attributes:
      title: Description of what one execution does.
      compile_s: Compile time in seconds.
      components: Figures by component, of one execution or of one iteration of its outermost loop.
      once: Figures outside the outermost loop, once per dispatch of up to `turns` iterations.
      turns: Maximum number of iterations of the outermost loop per dispatch.
      collectives: Number of collectives and total bytes of their results, by kind.
      copies: Copies of at least 1 MiB inside the loop: (name, executions, bytes, ms by cycles).
      kernels: Number of executions of each Pallas kernel, for which the compiler has no cycles.
      temporary_bytes: Memory for temporaries, without arguments and results.
      compiler: The compiler's own totals, which count the body of a loop and each branch once.
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
        """Returns the sum of all components."""
        return components.total(self.components.values())


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Report of a run on a topology.

    Attributes:
      mesh: Number of devices by mesh axis.
      memory: Bytes used on each device, by kind.
      capacity_bytes: Memory of each device in bytes.
      refused: The compiler's message about a program that does not fit, or None.
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
        """Returns the bytes used on each device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Returns whether the compiler estimates that the run fits in device memory."""
        return self.refused is None and self.used_bytes <= self.capacity_bytes

    def exceeded_budgets(self, tpu: TpuConfig) -> list[str]:
        """Returns one line for each limit that the run exceeds."""
        chip = self.topology.chip
        lines = []
        if not self.fits:
            used, capacity = self.used_bytes / 1e9, self.capacity_bytes / 1e9
            reason = self.refused or f"{used:.2f} GB of {capacity:.2f} GB per device"
            lines.append(f"does not fit in the memory of {self.topology.name}: {reason}")
        used_gb = self.used_bytes * chip.devices / 1e9
        if tpu.max_hbm_gb is not None and used_gb > tpu.max_hbm_gb:
            lines.append(f"tpu.max_hbm_gb: {used_gb:.2f} GB per chip, over {tpu.max_hbm_gb}")
        if tpu.max_cycle_ms is not None and CYCLE in self.programs:
            took = self.programs[CYCLE].total.cycles_ms
            if took > tpu.max_cycle_ms:
                lines.append(f"tpu.max_cycle_ms: {took:.3f} ms by cycles, over {tpu.max_cycle_ms}")
        return lines


def examine(
    program: CompiledProgram, assumptions: RunAssumptions, chip: Chip, rates: RooflineRates
) -> ProgramReport:
    """Reads the figures of a compiled program."""
    module = hlo.parse(program.compiled.as_text())
    operations = costs.operations(module, trips=assumptions.trips, branch=assumptions.branch)
    # The figures of a program that is a loop are those of one iteration.
    inside = [operation for operation in operations if operation.loops or not program.is_loop]
    around = [operation for operation in operations if not operation.loops and program.is_loop]
    memory, analysis = program.compiled.memory_analysis(), program.compiled.cost_analysis()
    return ProgramReport(
        title=program.title,
        compile_s=program.seconds,
        components=components.summarize(inside, _ideals(program, inside), chip, rates),
        once=components.total(components.summarize(around, {}, chip, rates).values()),
        turns=program.turns,
        collectives=components.collectives(inside),
        copies=[_copy(operation, chip) for operation in components.big_copies(inside)],
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
    """Returns the report as JSON values: times in ms and sizes in bytes, per device."""
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
            name: dataclasses.asdict(program) | {"total": dataclasses.asdict(program.total)}
            for name, program in report.programs.items()
        },
    }


def _ideals(program: CompiledProgram, operations: Sequence[ScheduledOperation]) -> dict[str, float]:
    """Returns the program's lower bounds, with the output head counted once per read."""
    head = program.ideals.get(UNEMBED, 0.0)
    reads = sum(
        operation.times
        for operation in operations
        if head
        and operation.read_bytes > head / 2
        and components.component_of(operation.scope) == UNEMBED
    )
    return {**program.ideals, UNEMBED: head * max(reads, 1)}


def _copy(operation: ScheduledOperation, chip: Chip) -> tuple[str, int, int, float]:
    milliseconds = operation.cycles / (chip.clock_ghz * 1e6) if chip.clock_ghz else 0.0
    instruction = operation.instruction
    return instruction.name, operation.times, instruction.num_bytes, milliseconds


def _kernels(operations: Sequence[ScheduledOperation]) -> dict[str, int]:
    """Counts executions of Pallas kernels by name, without the compiler's numeric suffixes."""
    counts: dict[str, int] = {}
    for operation in operations:
        instruction = operation.instruction
        is_pallas = 'custom_call_target="tpu_custom_call"' in instruction.attributes
        if instruction.opcode == "custom-call" and is_pallas:
            name = re.sub(r"(\.\d+)+$", "", instruction.name)
            counts[name] = counts.get(name, 0) + operation.times
    return counts


def lines(report: CompileReport) -> list[str]:
    """Returns the report as lines of text."""
    topology, chip = report.topology, report.topology.chip
    mesh = " × ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    slices = f"{topology.slices} × " if topology.slices > 1 else ""
    plural = "s" if topology.num_chips > 1 else ""
    return [
        f"{slices}{topology.name}: {topology.num_chips} chip{plural}, mesh {mesh}",
        f"one chip: {chip.tflops:g} TFLOP/s bf16, {chip.hbm_gb_per_s:g} GB/s, {chip.hbm_gb:g} GB, "
        f"ridge at {chip.ridge_rows:.0f} rows",
        LABEL,
        "",
        *_memory(report),
        *(line for program in report.programs.values() for line in ("", *_program(program))),
    ]


def _memory(report: CompileReport) -> list[str]:
    devices = report.topology.chip.devices
    rows = [f"  {kind:<24}{size * devices / 1e9:>10.3f} GB" for kind, size in report.memory.items()]
    used, capacity = report.used_bytes * devices / 1e9, report.capacity_bytes * devices / 1e9
    verdict = "fits" if report.fits else "does NOT fit"
    refused = [f"  compiler error: {report.refused}"] if report.refused else []
    return [
        "memory per chip",
        *rows,
        f"  {'sum':<24}{used:>10.3f} GB of {capacity:g} GB: {verdict}",
        *refused,
    ]


def _program(program: ProgramReport) -> list[str]:
    head = f"{'':<20}{'ideal':>10}{'roofline':>10}{'cycles':>10}{'prefetch':>10}"
    total, once = program.total, program.once
    text = [
        f"{program.title} (compiled in {program.compile_s:.0f} s)",
        f"  {head}{'GFLOP':>10}{'MB':>10}",
        *(_row(name, part) for name, part in program.components.items()),
        _row("all", total),
    ]
    if total.ideal_ms:
        by_roofline = total.roofline_ms / total.ideal_ms
        by_cycles = total.cycles_ms / total.ideal_ms
        text.append(f"  × ideal: {by_roofline:.2f} by roofline, {by_cycles:.2f} by cycles")
    if once.cycles_ms or once.hbm_bytes:
        text.append(
            f"  outside the loop, once per {program.turns} iterations: "
            f"{once.cycles_ms:.3f} ms by cycles, {once.hbm_bytes / 1e6:.0f} MB"
        )
    text += [_collectives(program), _copies(program)]
    if program.kernels:
        kernels = ", ".join(f"{count} × {name}" for name, count in program.kernels.items())
        text.append(f"  kernels, not included in cycles: {kernels}")
    return text


def _row(name: str, part: Component) -> str:
    return (
        f"  {name:<20}{part.ideal_ms:>10.3f}{part.roofline_ms:>10.3f}{part.cycles_ms:>10.3f}"
        f"{part.async_ms:>10.3f}{part.flops / 1e9:>10.1f}{part.hbm_bytes / 1e6:>10.1f}"
    )


def _collectives(program: ProgramReport) -> str:
    if not program.collectives:
        return "  collectives: none"
    kinds = ", ".join(
        f"{count} × {kind} ({size / 1e6:.3f} MB in total)"
        for kind, (count, size) in program.collectives.items()
    )
    return f"  collectives: {kinds}"


def _copies(program: ProgramReport) -> str:
    copies = program.copies
    if not copies:
        return "  copies and layout changes of 1 MiB or more: none"
    times = sum(times for _, times, _, _ in copies)
    size = sum(times * size for _, times, size, _ in copies) / 1e6
    milliseconds = sum(times * each for _, times, _, each in copies)
    name, _, largest, _ = max(copies, key=lambda copy: copy[2])
    return (
        f"  copies and layout changes of 1 MiB or more: {times}, {size:.1f} MB, "
        f"{milliseconds:.3f} ms; the largest is {name} of {largest / 1e6:.1f} MB"
    )
