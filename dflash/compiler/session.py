"""Compiles a run for a topology and reports on it."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from dflash.compiler import programs, report, topology
from dflash.compiler.programs import Program
from dflash.compiler.report import ProgramReport, Report, Situation
from dflash.config.tpu_schema import CompileDecode, CompileTrain

# How the compiler reports that a program exceeds the memory.
_FULL = "Ran out of memory"


def compile_run(
    config: CompileDecode | CompileTrain, progress: Callable[[str], None] = lambda line: None
) -> Report:
    """Compiles every program of a run, and reads the compiler's figures.

    Args:
      config: with the machine in its `tpu` group.
      progress: called with a line for each program.
    Raises:
      ConfigError: no such machine, or a mesh or model that does not fit it.
    """
    machine = topology.find(config.tpu.topology, config.tpu.slices)
    mesh = dataclasses.asdict(config.mesh)
    sharding = topology.make_sharding(machine, mesh, config.sharding_rules)
    rates = topology.compiler_rates(machine)
    trains = isinstance(config, CompileTrain)
    decode = config.evaluation_decode if trains else config.decode
    found, memory, refused = {}, {}, None
    steps = (
        programs.of_training(config, sharding)
        if trains
        else programs.of_decoding(config, config.tpu, sharding)
    )
    try:
        for program in steps:
            progress(f"compiled {program.title} in {program.seconds:.0f} s")
            situation = Situation.of(program.context, decode)
            found[program.name] = report.examine(program, situation, machine.chip, rates)
            memory = larger(memory, _memory(program, found[program.name]))
    except jax.errors.JaxRuntimeError as error:
        if _FULL not in str(error):
            raise
        refused = " ".join(str(error).split())[:400]
    capacity = machine.chip.hbm_gb * 1e9 / machine.chip.devices
    return Report(machine, mesh, rates, memory, capacity, refused, found)


def _memory(program: Program, found: ProgramReport) -> dict[str, int]:
    return {
        **program.arguments,
        "temporaries": found.temporary_bytes,
        "programs": found.code_bytes,
    }


def larger(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    """Kind by kind the larger of both: programs run one after the other over the same arrays."""
    return {kind: max(a.get(kind, 0), b.get(kind, 0)) for kind in {**a, **b}}
