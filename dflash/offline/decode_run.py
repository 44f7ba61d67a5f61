"""Decode run, from its pending prompts to its summary.

A conversation of several turns takes several rounds, since a later turn's prompt contains the
model's answer to the turn before. Each round decodes every prompt that is ready.
"""

import contextlib
import dataclasses
import datetime
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash.config import loader
from dflash.config.schema import AUTO, DecodeRun, DrafterConfig
from dflash.inference import difference
from dflash.inference.difference import Difference
from dflash.inference.engine import Engine
from dflash.inference.logits import controls
from dflash.inference.request import RequestOutput, Tokens, max_length
from dflash.inference.stats import SchedulerStats
from dflash.loading.job import Job
from dflash.offline.decoding import Usage, decode
from dflash.parallel import distributed
from dflash.runs import outputs, processor_load, result_text, shards
from dflash.runs import records as records_lib
from dflash.runs.directory import RunDirectory, check_config
from dflash.runs.display import Display
from dflash.runs.outputs import Record, Summary
from dflash.runs.processor_load import LoadMeter
from dflash.runs.records import Records
from dflash.runs.shards import Shard
from dflash.storage import paths
from dflash.text import prompts
from dflash.text.prompts import Prompt
from dflash.text.tokenizer import IncrementalDecoder, decode_output


class RunRecords(NamedTuple):
    """Finished prompts of a run, with drafting and, for a baseline, without."""

    drafted: Records
    baseline: Records | None


@contextlib.contextmanager
def open_records(
    directory: str | os.PathLike | None,
    config: DecodeRun,
    date: datetime.date | None = None,
    shard: Shard | None = None,
) -> Iterator[RunRecords]:
    """Yields the records of a run; only the first process writes them to the work directory.

    Args:
      directory: Work directory; None keeps the records in memory.
      date: Date of the run, stored for later starts; see `dates.find`.
      shard: Part of the prompts, if the run is divided.
    Raises:
      WorkdirError: The directory cannot be used.
    """
    file = str if shard is None else shard.file
    if shard is not None and directory is not None and jax.process_index() == 0:
        records_lib.check_division(paths.to_path(directory), shard)
    with contextlib.ExitStack() as stack:
        workdir = stack.enter_context(
            RunDirectory(directory, config, is_used=records_lib.has_outputs, date=date, shard=shard)
        )

        def records(name: str) -> Records:
            return stack.enter_context(
                records_lib.open_in(workdir, file(name), file(records_lib.RESULTS))
            )

        drafted = records(records_lib.OUTPUTS)
        baseline = records(records_lib.BASELINE) if config.decode.baseline else None
        if shard is not None and workdir.writes:
            # If two shards started together with different configs, one overwrote the other's file.
            check_config(workdir.path, config)
        yield RunRecords(drafted, baseline)


def load_weights(job: Job) -> Job:
    """Loads the weights of a job's models in place, and returns the job."""
    job.load_weights()
    return job


def run(
    job: Job,
    records: RunRecords,
    display: Display,
    *,
    load: Callable[[Job], Job] = load_weights,
    profile_dir: str | None = None,
) -> dict[str, Any]:
    """Decodes the pending prompts, and summarizes them with those of earlier runs.

    Args:
      job: Job of the run; its weights are read only if a prompt is pending.
      records: Records of this run and of earlier ones in the same work directory.
      load: Returns the job with its weights.
    Returns:
      Content of results.json.
    Raises:
      UserError: A checkpoint, a prompt or the work directory is unusable.
    """
    drafted, baseline = records
    ready = _ready(job, drafted)
    plain_ready = [] if baseline is None else _ready(job, baseline)
    for line in (*job.notes(), *prompts.dropped_answers(job.prompts)):
        display.note(line)
    if ready or plain_ready:
        with display.status("loading weights"):
            job = load(job)
    else:
        display.note("nothing left to do: all prompts were finished before")
    usage, meter = Usage(), LoadMeter()
    cycle_ms = _decode(job, drafted, ready, display, profile_dir, usage)
    if plain_ready:
        with display.status("decoding without drafting"):
            _decode(job.without_drafting(), baseline, plain_ready, Display.silent())
    if not ready and not plain_ready:
        return report(job, records, display, {}, earlier=drafted.results())
    usage.others_share = meter.read().others_share
    return report(job, records, display, cycle_ms, usage, _differences(job, records))


def _differences(job: Job, records: RunRecords) -> dict[str, Difference]:
    """Returns the first differences between a run and its baseline, of some prompts."""
    decode = job.config.decode
    if records.baseline is None or (decode.verify != "coupled" and decode.temperature > 0):
        return {}
    plain, unequal = records.baseline.completed(), []
    for index, record in records.drafted.completed().items():
        if record.output_ids != plain[index].output_ids:
            unequal.append((index, record.prompt_ids, plain[index].output_ids, record.output_ids))
    # Only the first process reads the records.
    unequal = distributed.broadcast(unequal[: difference.MOST_EXPLAINED])
    results = {}
    for index, prompt, *outputs_ in unequal:
        turn = dataclasses.replace(job.prompts[0], index=index, ids=tuple(prompt))
        (request,) = job.requests([turn])
        results[f"prompt {index}"] = difference.explain(job.target, decode, request, *outputs_)
    return results


def all_turns(job: Job) -> list[Prompt]:
    """Returns every turn of a job's conversations as a separate prompt, in order of index.

    If there are later turns, the model's answers between the turns are decoded first.

    Args:
      job: Job with loaded weights.
    Raises:
      InputError: The chat template rejects a conversation, or it has grown too long.
    """
    # The answer to the last turn is not needed, since no turn follows it.
    conversations = [
        dataclasses.replace(prompt, later_turns=prompt.later_turns[:-1])
        for prompt in job.prompts
        if prompt.later_turns
    ]
    job_between, records = dataclasses.replace(job, prompts=tuple(conversations)), Records()
    _decode(job_between, records, _ready(job_between, records), Display.silent())
    done, turns = records.completed(), []
    for prompt in job.prompts:
        turns.append(dataclasses.replace(prompt, later_turns=()))
        for turn in range(1, len(prompt.indices)):
            turns.append(job.follow(prompt, turn, done[prompt.index + turn - 1]))
    return turns


def _decode(
    job: Job,
    records: Records,
    ready: list[Prompt],
    display: Display,
    profile_dir: str | None = None,
    usage: Usage | None = None,
) -> dict[str, float]:
    """Decodes the prompts that are ready, round by round, and adds to `usage`.

    Returns:
      Milliseconds per cycle by block size, for sequences of half the maximal length; empty if the
      block size is fixed.
    """
    engine, clock_s = None, 0.0
    while ready:
        engine = _engine(job, engine, ready)
        with display.compiling() as progress:
            greedy = all(map(controls.is_greedy, job.requests(ready)))
            engine.compile((len(prompt.ids) for prompt in ready), progress, greedy=greedy)
        if engine.must_time_cycles:
            with display.status("timing cycles"):
                engine.time_cycles()
        with jax.profiler.trace(profile_dir) if profile_dir else contextlib.nullcontext():
            clock_s = _round(job, engine, ready, records, display, clock_s, usage or Usage())
        ready = _ready(job, records)
    if engine is None or engine.cycle_seconds is None:
        return {}
    milliseconds = 1e3 * np.asarray(engine.cycle_seconds)[-1, -1]
    return dict(zip(engine.rules.choices.names, milliseconds.tolist(), strict=True))


def _ready(job: Job, records: Records) -> list[Prompt]:
    ready = []
    done = records.completed()
    for prompt in records.pending(job.prompts):
        turn = next(turn for turn, index in enumerate(prompt.indices) if index not in done)
        ready.append(job.follow(prompt, turn, done[prompt.index + turn - 1]) if turn else prompt)
    # Only the first process reads the records.
    return distributed.broadcast(ready, [Prompt])


def _engine(job: Job, engine: Engine | None, ready: Sequence[Prompt]) -> Engine:
    """Returns the current engine, or a new one if a conversation has outgrown it."""
    needed = max_length(job.requests(ready))
    if engine is not None and engine.has_room(needed, len(job.stop_ids)):
        return engine
    return job.engine(ready)


def _round(
    job: Job,
    engine: Engine,
    ready: Sequence[Prompt],
    records: Records,
    display: Display,
    clock_s: float,
    usage: Usage,
) -> float:
    """Decodes prompts, and returns the clock in seconds, which continues from `clock_s`."""
    by_index = {prompt.index: prompt for prompt in ready}
    words = {
        index: IncrementalDecoder(job.tokenizer, prompt=prompt.ids)
        for index, prompt in by_index.items()
    }
    silent = frozenset(job.stop_ids)
    display.expect(
        {index: len(prompt.ids) for index, prompt in by_index.items()},
        {index: result_text.prompt_text(_input(prompt)) for index, prompt in by_index.items()},
    )
    reached_s, begin, tokens = clock_s, time.perf_counter(), 0

    def tell(stats: SchedulerStats) -> None:
        seconds = time.perf_counter() - begin
        slots = engine.layout.batch_size
        usage.add(stats, slots=slots, tokens=tokens, seconds=seconds)

    for event in decode(engine, job.requests(ready), tell):
        if isinstance(event, Tokens):
            shown = (token for token in event.ids if token not in silent)
            display.token(event.id, words[event.id].push(shown))
            continue
        tokens += len(event.output_ids)
        display.token(event.id, words.pop(event.id).flush())
        reached_s = clock_s + event.decode_clock_s
        record = _record(by_index[event.id], event, job.tokenizer, reached_s)
        display.finish(event.id, result_text.summary_line(records.append(record)))
    return reached_s


def _input(prompt: Prompt) -> str | tuple[Mapping[str, Any], ...] | None:
    return prompt.text if prompt.messages is None else prompt.messages


def _record(prompt: Prompt, completion: RequestOutput, tokenizer, clock_s: float) -> Record:
    return Record(
        index=prompt.index,
        prompt=_input(prompt),
        prompt_ids=prompt.ids,
        output_ids=completion.output_ids,
        text=decode_output(tokenizer, prompt.ids, completion.text_ids),
        finish_reason=completion.finish_reason,
        acceptance_lengths=completion.acceptance_lengths,
        prefill_ms=completion.prefill_ms,
        decode_ms=completion.decode_ms,
        decode_clock_s=clock_s,
        block_sizes=completion.block_sizes,
    )


def report(
    job: Job,
    records: RunRecords,
    display: Display,
    cycle_ms: dict[str, float],
    usage: Usage | None = None,
    differences: Mapping[str, Difference] = types.MappingProxyType({}),
    earlier: Mapping[str, Any] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """Summarizes all prompts of the work directory, including those of earlier runs.

    Args:
      records: Records of all prompts, which are finished.
      cycle_ms: Milliseconds per cycle by block size; empty if the block size is fixed.
      usage: Usage since this start of the run; None if it has decoded nothing.
      differences: First differences from the baseline, by where they are.
      earlier: Content of results.json, if nothing was left to decode.
    Returns:
      Content of results.json.
    Raises:
      UnequalError: Rounding does not explain a difference; everything is written and shown.
    """
    done, longest = records.drafted.completed(), job.longest_path
    summary: Summary = outputs.summarize(done.values(), block_size=longest)
    devices = [f"{device.platform}:{device.device_kind}" for device in job.devices]
    facts: dict[str, Any] = {
        **earlier,
        "answers": job.grade(done),
        "devices": devices,
        "processes": jax.process_count(),
        "versions": outputs.versions(),
    }
    if records.baseline is not None:
        plain = records.baseline.completed()
        comparison = outputs.compare(done, plain, block_size=longest)
        facts["baseline"] = dataclasses.asdict(comparison)
        told = difference.lines(differences) or earlier.get("baseline", {}).get("differences", [])
        facts["baseline"]["differences"] = told
    if cycle_ms:
        facts["cycle_ms"] = cycle_ms
    facts |= usage.facts() if usage is not None else {}
    if job.shard.count > 1:
        facts["shard"] = str(job.shard)
    records.drafted.write_results(summary, **facts)
    display.results(summary, result_text.event_rows(facts))
    if records.baseline is not None:
        warning = processor_load.warning(facts.get("others_share"))
        display.comparison(done, plain, summary, comparison, warning)
        for line in (*told, *_warnings(comparison.speed_up, longest, job.config.drafter)):
            display.note(f"\n{line}")
    if facts["answers"]:
        display.note("\nanswers  {correct} of {checked} correct".format(**facts["answers"]))
    difference.refuse_faults(differences)
    return {**dataclasses.asdict(summary), **facts}


def _warnings(speed_up: float | None, rows: int, drafter: DrafterConfig) -> list[str]:
    if speed_up is None or speed_up >= 1 or rows == 1:  # A single row is plain decoding.
        return []
    has_fixed_size = getattr(drafter, "block_size", AUTO) != AUTO
    auto = "drafter.block_size=auto, which measures, or " if has_fixed_size else ""
    return [
        f"warning: drafting is slower than plain decoding ({speed_up:.2f} ×); try {auto}"
        "drafter.name=none"
    ]


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
    report(job, RunRecords(drafted, baseline), display, {})
