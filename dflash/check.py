"""Diagnoses a pair of target and drafter: dflash check CONFIG [key=value ...]."""

from dflash.cli import subcommand as cli
from dflash.config import schema

SUBCOMMAND = cli.Subcommand(
    "check",
    "Diagnoses a pair of target and drafter. It prints the fields that must fit, decodes up to 16 "
    "prompts, shows the acceptance by draft position, and then tries other readings of single "
    "fields with the same weights: taps, causality, windows, rotary base, mask token, "
    "chat template, thinking mode. A field whose other reading accepts clearly more is suspicious.",
    examples=(
        "dflash check configs/tiny_dflash.yml",
        "dflash check configs/tiny_dflash2.yml",
        "dflash check configs/tiny_eagle3.yml",
        "dflash check configs/qwen3_4b_dflash.yml prompts.dataset=gsm8k",
        "dflash check configs/qwen3_8b_dflash.yml drafter.checkpoint=path/to/drafter",
    ),
    schema=schema.DecodeRun,
    shared=("print_config", "compilation_cache"),
    statuses="1 also if a field is suspicious",
)


def _check(command: cli.Command) -> int:
    # jax is imported here, after the config has been validated.
    from dflash.loading import job as jobs
    from dflash.measure.pair import diagnosis, report
    from dflash.runs.display import Display

    job = diagnosis.prepare(jobs.prepare_models(command.config))
    job.load_weights()
    print("\n".join(report.facts(job)), flush=True)
    readings, display = diagnosis.alternatives_of(job), Display(stream=False)
    with display.compiling() as progress:
        engine = diagnosis.compiled_engine(job, readings, progress)
    with display.status(f"decoding {len(job.prompts)} prompts"):
        decoded = diagnosis.measure(engine, job)
    acceptance = decoded.acceptance
    print("", *report.acceptance_lines(job, acceptance), "", sep="\n", flush=True)
    if readings:
        print("other readings of one field, on the same texts", flush=True)
    results = diagnosis.read_all(
        engine,
        job,
        decoded,
        readings,
        lambda reading: print(report.reading_line(reading, acceptance), flush=True),
    )
    suspect = diagnosis.suspicious(acceptance, results)
    print("", report.verdict(job, acceptance, suspect), sep="\n")
    return 0 if suspect is None else 1


main = cli.entry_point(SUBCOMMAND, _check)

if __name__ == "__main__":
    main()
