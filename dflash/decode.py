"""Decodes prompts: dflash decode CONFIG [key=value ...] [--workdir DIR]."""

import contextlib
import sys

from dflash.cli import subcommand as cli
from dflash.config import schema

SUBCOMMAND = cli.Subcommand(
    "decode",
    "Decodes prompts with a target and a drafting strategy, losslessly: in float32 the output is "
    "the target's own, token for token. Text goes to stdout, everything else to stderr; with "
    "--workdir there are outputs.jsonl and results.json, and the same command skips what is done.",
    examples=(
        "dflash decode configs/tiny_dflash.yml              # embedded, no download",
        "dflash decode configs/tiny_dflash.yml \\",
        "  prompts.text='Tom has 3 pens and finds 4 more. How many pens does Tom have?'",
        "dflash decode configs/tiny_dflash.yml decode.temperature=0.8 decode.seed=1",
        "dflash decode configs/tiny_dflash.yml drafter.name=none      # the baseline",
        "dflash decode configs/qwen3_4b_dflash.yml --dry_run mesh.tensor=4",
        "dflash decode hf:Qwen/Qwen3-0.6B prompts.text=Hi",
        "dflash decode configs/qwen3_4b_dflash.yml prompts.file=p.jsonl --workdir w",
        "dflash decode configs/tiny_dflash.yml prompts.file=p.jsonl --shard 0/8 \\",
        "    --workdir w",
    ),
    schema=schema.DecodeRun,
    shared=(*cli.RUN_FLAGS, "shard", "stream"),
)


def _decode(command: cli.Command) -> None:
    # jax is imported here, after the config has been validated.
    from dflash.loading import job as jobs
    from dflash.offline import decode_run
    from dflash.parallel import distributed
    from dflash.runs import dates, frame, records, shards
    from dflash.text import prompts

    shard = command.shard
    # A dry run touches no device, so it asks no other process for the date.
    date = None if command.dry_run else dates.find(command.workdir, shared=shard is not None)
    job = jobs.prepare(command.config, stdin=sys.stdin, dry=command.dry_run, date=date)
    if command.dry_run:
        lines = *job.plan().lines(), *job.notes(), *prompts.dropped_answers(job.prompts)
        print("\n".join(lines))
        return
    divided = shard is None and distributed.compute_on_first(
        lambda: shards.is_divided(command.workdir, records.OUTPUTS)
    )
    with contextlib.closing(frame.open_display(stream=command.stream)) as display:
        if divided:
            decode_run.sum_up(job, command.workdir, display)
            return
        mine = job if shard is None else job.of_shard(shard)
        with decode_run.open_records(command.workdir, command.config, date, shard) as results:
            decode_run.run(mine, results, display, profile_dir=command.profile_dir)
        if shard is not None:
            decode_run.sum_up(job, command.workdir, display, shard=shard)


main = cli.entry_point(SUBCOMMAND, _decode)

if __name__ == "__main__":
    main()
