"""Compiles a run for a topology and reports on it."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from dflash.compiler import programs, report, topology
from dflash.compiler.programs import Program
from dflash.compiler.report import ProgramReport, Report, Situation
from dflash.config.tpu_schema import CompileDecode, CompileTrain

# Called before each step: what it does, and the share that is done.
Progress = Callable[[str, float], None]

# How the compiler reports that a program exceeds the memory.
_FULL = "Ran out of memory"


def compile_run(
    config: CompileDecode | CompileTrain,
    progress: Progress = lambda what, done: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Compiles every program of a run, and reads the compiler's figures.

    Args:
      config: with the machine in its `tpu` group.
      progress: called before each program is compiled.
      keep: called after each program with the report so far.
    Raises:
      ConfigError: no such machine, or a mesh or model that does not fit it.
    """
    machine = topology.find(config.tpu.topology, config.tpu.slices)
    mesh = dataclasses.asdict(config.mesh)
    sharding = topology.make_sharding(machine, mesh, config.sharding_rules)
    rates = topology.compiler_rates(machine)
    trains = isinstance(config, CompileTrain)
    decode = config.evaluation_decode if trains else config.decode
    capacity = machine.chip.hbm_gb * 1e9 / machine.chip.devices
    found, memory, refused = {}, {}, None
    total = programs.count(config, config.tpu)

    def starting(title: str) -> None:
        progress(title, len(found) / total)

    def report_so_far() -> Report:
        return Report(machine, mesh, rates, memory, capacity, refused, dict(found))

    steps = (
        programs.of_training(config, sharding, starting)
        if trains
        else programs.of_decoding(config, config.tpu, sharding, starting)
    )
    try:
        for program in steps:
            situation = Situation.of(program.context, decode)
            found[program.name] = report.examine(program, situation, machine.chip, rates)
            memory = larger(memory, _memory(program, found[program.name]))
            keep(report_so_far())
    except jax.errors.JaxRuntimeError as error:
        if _FULL not in str(error):
            raise
        refused = " ".join(str(error).split())[:400]
    return report_so_far()


def _memory(program: Program, found: ProgramReport) -> dict[str, int]:
    return {
        **program.arguments,
        "temporaries": found.temporary_bytes,
        "programs": found.code_bytes,
    }


def larger(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    """Kind by kind the larger of both: programs run one after the other over the same arrays."""
    return {kind: max(a.get(kind, 0), b.get(kind, 0)) for kind in {**a, **b}}
