"""Text form of the compile report."""

from collections.abc import Iterable

from dflash.compiler.components import Component
from dflash.compiler.report import LABEL, CompileReport, ProgramReport


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
    whole, once = program.total, program.once
    text = [
        f"{program.title} (compiled in {program.compile_s:.0f} s)",
        f"  {head}{'GFLOP':>10}{'MB':>10}",
        *(_row(name, part) for name, part in program.components.items()),
        _row("all", whole),
    ]
    if whole.ideal_ms:
        by_roofline = whole.roofline_ms / whole.ideal_ms
        by_cycles = whole.cycles_ms / whole.ideal_ms
        text.append(f"  × ideal: {by_roofline:.2f} by roofline, {by_cycles:.2f} by cycles")
    if once.cycles_ms or once.hbm_bytes:
        text.append(
            f"  outside the loop, once per {program.turns} iterations: "
            f"{once.cycles_ms:.3f} ms by cycles, {once.hbm_bytes / 1e6:.0f} MB"
        )
    text += [_collectives(program), _copies(program)]
    if program.kernels:
        text.append(f"  kernels, not included in cycles: {_counts(program.kernels.items())}")
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
    largest = max(copies, key=lambda copy: copy[2])
    return (
        f"  copies and layout changes of 1 MiB or more: {times}, {size:.1f} MB, "
        f"{milliseconds:.3f} ms; "
        f"the largest is {largest[0]} of {largest[2] / 1e6:.1f} MB"
    )


def _counts(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in items)
