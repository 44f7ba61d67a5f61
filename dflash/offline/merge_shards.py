"""Summary of a list of prompts that several runs have divided among themselves."""

import os

import jax

from dflash.config import loader
from dflash.loading.job import Job
from dflash.offline import decode_run
from dflash.runs import records as records_lib
from dflash.runs import shards
from dflash.runs.directory import check_config
from dflash.runs.display import Display
from dflash.runs.records import Records
from dflash.runs.shards import Shard
from dflash.storage import paths


def sum_up(
    job: Job, directory: str | os.PathLike, display: Display, *, shard: Shard | None = None
) -> None:
    """Writes the summary of all shards of a run.

    Args:
      job: Job with the prompts of all shards.
      shard: Shard that has just finished. If others are unfinished, the display lists them, and
        the last one to finish writes the summary.
    Raises:
      WorkdirError: Some shards have not finished, or belong to another config.
    """
    if jax.process_index() > 0:
        return
    path = paths.to_path(directory)
    check_config(path, job.config)
    all_shards = shards.shards_in(path, records_lib.OUTPUTS)
    shards.check_count(path, records_lib.OUTPUTS, shard or all_shards[0])
    count = all_shards[0].count
    if shard is not None:
        missing = shards.missing(path, records_lib.RESULTS, count)
        if missing:
            display.note(f"shard {shard} is done; not finished yet: {shards.listed(missing)}")
            return
    digest = loader.config_hash(job.config)

    def joined(name: str) -> Records:
        records = records_lib.join(path, digest, name, count)
        pending = {prompt.index for prompt in records.pending(job.prompts)}
        unfinished = [
            part
            for part in shards.Shard(0, count).all()
            if any(p.index in pending for p in part.of(job.prompts))
        ]
        shards.check_finished(path, unfinished)
        return records

    drafted = joined(records_lib.OUTPUTS)
    baseline = joined(records_lib.BASELINE) if job.config.decode.baseline else None
    decode_run.report(job, decode_run.RunRecords(drafted, baseline), display, {})
