"""Answers that the baseline decodes, on which studies replay the cycles of drafters."""

import dataclasses
from collections.abc import Generator
from typing import NamedTuple

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.inference.replay import Text
from dflash.loading.job import Job
from dflash.measure import bench as benches
from dflash.measure.bench import Bench
from dflash.measure.studies.result import Step


class Answers(NamedTuple):
    """Texts of all tasks, and the task of each of them."""

    texts: list[Text]
    tasks: list[str]


def prepare(config: BenchmarkRun, study: str) -> tuple[Bench, dict[str, Job]]:
    """Returns a bench of the baseline alone, and the jobs of the strategies that draft.

    Raises:
      ConfigError: The run does not decode greedily, or drafts nothing of its own.
    """
    if config.forced:
        raise errors.ConfigError(
            f"{study} measures what is accepted; leave trace and acceptance out"
        )
    if config.decode.temperature:
        raise errors.ConfigError(
            f"decode.temperature: {study} replays greedy decoding; leave it out"
        )
    if not config.strategies:
        raise errors.ConfigError(f"strategies: {study} needs at least one strategy that drafts")
    plain = benches.prepare(dataclasses.replace(config, strategies={}))
    jobs = benches.prepare_models(config, plain.target)
    return plain, {name: job for name, job in jobs.items() if job.drafter.num_draft_tokens}


def decode(plain: Bench) -> Generator[Step, None, Answers]:
    """Decodes the prompts of all tasks with the baseline, in the first half of a study.

    Returns:
      The answers in the order of the tasks.
    """
    yield Step("loading weights", 0)
    plain.load()
    plain.decode_later_turns()
    yield Step("compiling", 0)
    plain.compile()
    found = Answers([], [])
    for task in plain.workload.tasks:
        for queue in plain.queues(task):
            yield Step(f"decoding {task}", len(found.texts) / len(plain.workload.items) / 2)
            prompts = {item.prompt.index: item.prompt.ids for item in queue}
            done = plain.decode(plain.baseline, queue)
            found.texts.extend(Text(prompts[one.id], one.output_ids) for one in done)
            found.tasks.extend([task] * len(done))
    return found
