"""The compile command: compiles the programs of a run for a topology, and reports on them."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from dflash.compiler import programs, report, topology
from dflash.compiler.programs import CompiledProgram
from dflash.compiler.report import CompileReport, ProgramReport, RunAssumptions
from dflash.compiler.topology import TpuMachine
from dflash.config.tpu_schema import CompileDecode, CompileTrain
from dflash.runs import frame
from dflash.runs.directory import RunDirectory

# Called before each step with a description of it and the fraction of the work that is done.
Progress = Callable[[str, float], None]

# Part of the compiler's message about a program that does not fit in device memory.
_OUT_OF_MEMORY = "Ran out of memory"


def run(config: CompileDecode | CompileTrain, *, workdir: str | None = None) -> CompileReport:
    """Compiles the programs of a run, prints the report and writes it.

    Args:
      config: Config of the run, with the topology in its `tpu` group.
      workdir: Directory for `compile.json` and `config.yml`; None writes nothing.
    Raises:
      UserError: The config, its models or the TPU compiler is unusable.
    """
    topology.prepare_environment()
    directory = open_directory(workdir, config)

    def keep(run_report: CompileReport, *, complete: bool = False) -> None:
        directory.write_json("compile.json", {"complete": complete, **report.to_json(run_report)})

    with frame.open_run(directory) as display:
        with display.progress("compiling", every_s=0) as progress:
            machine = topology.find_machine(config)
            run_report = compile_programs(config, machine, progress, keep)
        keep(run_report, complete=True)
    print("\n".join(report.lines(run_report)), flush=True)
    return run_report


def open_directory(workdir: str | None, config: CompileDecode | CompileTrain) -> RunDirectory:
    """Opens a directory whose reports a later run may replace, whatever its config."""
    return RunDirectory(workdir, config, is_used=lambda path: False, may_change=lambda key: True)


def compile_programs(
    config: CompileDecode | CompileTrain,
    machine: TpuMachine,
    progress: Progress = lambda title, fraction: None,
    keep: Callable[[CompileReport], None] = lambda report_so_far: None,
) -> CompileReport:
    """Compiles every program of a run and reads the compiler's figures.

    Args:
      progress: Called before each program is compiled.
      keep: Called after each program with the report so far.
    Raises:
      ConfigError: The models do not fit each other or the mesh.
    """
    tpu, rates = machine.topology, machine.rates
    mesh = dataclasses.asdict(config.mesh)
    trains = isinstance(config, CompileTrain)
    decode = config.evaluation_decode if trains else config.decode
    capacity = tpu.chip.hbm_gb * 1e9 / tpu.chip.devices
    reports, memory, refused = {}, {}, None
    total = programs.count(config, config.tpu)

    def on_start(title: str) -> None:
        progress(title, len(reports) / total)

    def report_so_far() -> CompileReport:
        return CompileReport(tpu, mesh, rates, memory, capacity, refused, dict(reports))

    if trains:
        steps = programs.compile_training(config, machine.sharding, on_start)
    else:
        named = config.target, config.drafter, config.dtype
        models = programs.decoding_models(*named, machine.sharding)
        steps = programs.compile_decoding(*models, decode, config.tpu, on_start)
    try:
        for program in steps:
            assumptions = RunAssumptions.of(program.context, decode)
            reports[program.name] = report.examine(program, assumptions, tpu.chip, rates)
            memory = larger(memory, _memory(program, reports[program.name]))
            keep(report_so_far())
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        refused = " ".join(str(error).split())[:400]
    return report_so_far()


def _memory(program: CompiledProgram, program_report: ProgramReport) -> dict[str, int]:
    return {
        **program.arguments,
        "temporaries": program_report.temporary_bytes,
        "programs": program_report.code_bytes,
    }


def larger(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    """Returns the maximum of two memory uses by kind.

    The programs of a run share their arrays and execute one after another.
    """
    return {kind: max(a.get(kind, 0), b.get(kind, 0)) for kind in {**a, **b}}
