"""A benchmark run: one target, several strategies, prompts decoded in turns."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.schema import DrafterConfig
from dflash.inference import difference
from dflash.inference.difference import Difference
from dflash.inference.engine import NUM_STOP_IDS
from dflash.inference.request import Request, RequestOutput, RequestSampling
from dflash.loading import job as jobs
from dflash.measure import workload as workloads
from dflash.measure.engine import MeasuredEngine, Parts, Probe
from dflash.measure.forced import ForcedDrafter
from dflash.measure.samples import Sample, TaskRound
from dflash.measure.workload import Item, Workload
from dflash.models.decoder import Decoder
from dflash.offline import decode_run
from dflash.offline.decoding import decode

BASELINE = DrafterConfig()  # The default strategy drafts nothing.

# Called before each step of a run with its description and the completed fraction of the run.
Progress = Callable[[str, float], None]


class Bench:
    """One target with its weights, and an engine for each strategy, the baseline first.

    Call the methods in this order: `load`, `decode_later_turns`, `compile`, `warm_up`, `run`.
    """

    def __init__(
        self,
        config: BenchmarkRun,
        strategies: Mapping[str, jobs.Job],
        workload: Workload,
        *,
        target_loaded: bool,
    ):
        """Initializes the bench; `prepare` builds its arguments."""
        self._target_loaded = target_loaded
        self.config = config
        self.workload = workload
        self.jobs = dict(strategies)
        self.engines: dict[str, MeasuredEngine] = {}

    @property
    def baseline(self) -> str:
        """Returns the name of the strategy that all others are compared with."""
        return next(iter(self.jobs))

    @property
    def target(self):
        """Returns the target, which all strategies share."""
        return self.jobs[self.baseline].target

    @property
    def block_sizes(self) -> dict[str, int]:
        """Returns the number of rows that the target verifies, by strategy."""
        return {name: job.drafter.block_size for name, job in self.jobs.items()}

    @property
    def longest_paths(self) -> dict[str, int]:
        """Returns the most tokens that a cycle may commit, by strategy."""
        return {name: job.drafter.longest_path for name, job in self.jobs.items()}

    def load(self) -> None:
        """Reads all weights: the target's once, or not at all if a loaded target was given."""
        if not self._target_loaded:
            self.jobs[self.baseline].load_target()
        for job in self.jobs.values():
            job.load_drafter()

    def decode_later_turns(self) -> None:
        """Turns the later turns of conversations into prompts of their own.

        Every strategy decodes them after the baseline's answers, so that all strategies decode the
        same prompts.

        Raises:
          InputError: A conversation no longer fits into the cache or the model's context.
        """
        turns = decode_run.all_turns(self.jobs[self.baseline])
        self.workload = self.workload.with_turns(turns)
        self.jobs = {name: jobs.with_prompts(job, turns) for name, job in self.jobs.items()}

    def compile(self, progress=lambda ready, total: None) -> None:
        """Builds all engines, compiles all their programs, and times cycles if a choice needs it.

        See `Engine.compile` and `Engine.time_cycles`.
        """
        lengths = [len(item.prompt.ids) for item in self.workload.items]
        self.engines = {name: self._engine(job) for name, job in self.jobs.items()}
        counts = {
            name: len(engine.program_names(lengths, greedy=engine.is_greedy))
            for name, engine in self.engines.items()
        }
        before, total = 0, sum(counts.values())
        for name, engine in self.engines.items():
            engine.compile(
                lengths,
                lambda ready, _, before=before: progress(before + ready, total),
                greedy=engine.is_greedy,
            )
            engine.time_cycles()
            before += counts[name]

    def _engine(self, job: jobs.Job) -> MeasuredEngine:
        if not self.workload.forced:
            return make_engine(job)
        sequences = max(map(len, self.workload.tasks.values()))
        cycles = max(item.max_new_tokens for item in self.workload.items)
        return make_engine(job, script=(sequences, cycles))

    def warm_up(self) -> None:
        """Runs a part of each task with every strategy, untimed, and discards the results."""
        for task in self.workload.tasks:
            first = self.queues(task)[0][: self.config.decode.batch_size]
            self.task_round(task, 0, [first])

    def queues(self, task: str) -> list[tuple[Item, ...]]:
        """Returns the task's prompts, grouped into queues; see `Workload.queues`."""
        return self.workload.queues(task, self.config.decode.batch_size)

    def decode(self, strategy: str, queue: Sequence[Item]) -> tuple[RequestOutput, ...]:
        """Decodes a queue of prompts; each free slot takes the next prompt."""
        engine = self.engines[strategy]
        engine.follow([script(item, self.longest_paths[strategy]) for item in queue])
        events = decode(engine, [self.request(item) for item in queue])
        done = [event for event in events if isinstance(event, RequestOutput)]
        return tuple(sorted(done, key=lambda completion: completion.id))

    def temperature(self, item: Item) -> float:
        """Returns the temperature at which an item is decoded."""
        return self.config.decode.temperature if item.temperature is None else item.temperature

    def request(self, item: Item, at_most: int | None = None) -> Request:
        """Returns the request that decodes an item, with at most `at_most` new tokens."""
        index = item.prompt.index
        new_tokens = min(item.max_new_tokens, at_most or item.max_new_tokens)
        # Forced acceptance commits any drafted token, so a stop token has no meaning.
        stop_ids = () if self.workload.forced else self.jobs[self.baseline].stop_ids
        decode = dataclasses.replace(self.config.decode, temperature=self.temperature(item))
        sampling = RequestSampling.from_config(decode, index)
        return Request(index, item.prompt.ids, new_tokens, sampling, stop_ids)

    def differences(self, done: Sequence[TaskRound]) -> dict[str, Difference]:
        """Returns the first differences between strategies and the baseline, of some prompts."""
        decoding = self.config.decode
        drawn = any(self.temperature(item) for item in self.workload.items)
        if self.workload.forced or (drawn and decoding.verify != "coupled"):
            return {}
        # A prompt is in one task for each temperature.
        items = {
            (task, item.prompt.index): item
            for task, of_task in self.workload.tasks.items()
            for item in of_task
        }
        outputs = [
            (sample.strategy, (sample.task, output.id), output.output_ids)
            for round_ in done
            for sample in round_.samples
            for output in sample.completions
        ]
        plain = {place: ids for name, place, ids in outputs if name == self.baseline}
        unequal = {(name, place): ids for name, place, ids in outputs if ids != plain[place]}
        results = {}
        for (name, place), ids in itertools.islice(unequal.items(), difference.MOST_EXPLAINED):
            request = self.request(items[place])
            explained = difference.explain(self.target, decoding, request, plain[place], ids)
            results[f"{name}, {place[0]}, prompt {place[1]}"] = explained
        return results

    def marks(
        self, queue: Sequence[Item], done: Sequence[RequestOutput]
    ) -> tuple[bool | None, ...]:
        """Returns whether each output has the right answer; None if its prompt has none."""
        tokenizer = self.jobs[self.baseline].tokenizer
        return tuple(
            item.grader(
                tokenizer.decode(completion.output_ids), finished=completion.finish_reason == "stop"
            )
            if item.grader
            else None
            for item, completion in zip(queue, done, strict=True)
        )

    def run(self, progress: Progress = lambda what, done: None) -> Iterator[TaskRound]:
        """Yields the measurements of every task in every round.

        Strategies take turns queue by queue, and their parts are timed between the queues, so that
        drift of the machine affects all strategies equally.
        """
        tasks = self.workload.tasks
        steps = self.config.rounds * sum(len(self.queues(task)) for task in tasks)
        steps *= len(self.jobs)
        counter = itertools.count()
        for number in range(self.config.rounds):
            for task in tasks:
                where = f"round {number + 1} of {self.config.rounds}, {task}"
                yield self.task_round(
                    task,
                    number,
                    self.queues(task),
                    lambda name, where=where: progress(f"{where}, {name}", next(counter) / steps),
                )

    def task_round(
        self,
        task: str,
        number: int,
        queues: Sequence[Sequence[Item]],
        progress: Callable[[str], None] = lambda name: None,
    ) -> TaskRound:
        """Runs one round over the given queues of a task."""
        samples, probes = [], {}
        times: dict[str, list[Parts]] = {}
        for queue in queues:
            conversations = tuple(item.conversation for item in queue)
            for name in self.engines:
                progress(name)
                done = self.decode(name, queue)
                marks = self.marks(queue, done)
                samples.append(Sample(task, name, number, done, conversations, marks))
            probes = probes or self._probes(queue, samples[0])
            # Time the parts as many times as the queue fills the slots.
            for _ in range(math.ceil(len(queue) / self.config.decode.batch_size)):
                for name, probe in probes.items():
                    times.setdefault(name, []).append(probe.parts())
        parts = {name: _median(timings) for name, timings in times.items()}
        return TaskRound(task, number, tuple(samples), parts)

    def _probes(self, queue: Sequence[Item], plain: Sample) -> dict[str, Probe]:
        output = plain.completions[0].output_ids
        context = (*queue[0].prompt.ids, *output[: len(output) // 2])
        probes = {
            name: Probe(engine, engine.occupied(context))
            for name, engine in self.engines.items()
            if engine.has_parts
        }
        for probe in probes.values():
            probe.parts()  # The first call is slower than all others.
        return probes


def make_engine(job: jobs.Job, *, script: tuple[int, int] | None = None) -> MeasuredEngine:
    """Builds an engine over a job's models.

    Args:
      script: Number of sequences, and of cycles per sequence, for which acceptance lengths can be
        forced; None leaves acceptance to verification.
    """
    drafter = job.drafter
    if script is not None and drafter.num_draft_tokens:
        sequences, cycles = script
        sharding = job.target.sharding
        drafter = ForcedDrafter(drafter, sequences=sequences, cycles=cycles, sharding=sharding)
    return MeasuredEngine(
        job.target,
        drafter,
        job.config.decode,
        max_length=job.max_length,
        adaptive_blocks=job.config.drafter.adaptive,
        divide_rows=job.config.drafter.divides_rows,
        num_stop_ids=max(NUM_STOP_IDS, len(job.stop_ids)),
    )


def script(item: Item, longest: int) -> list[int]:
    """Returns the item's forced acceptance lengths, cut to `longest`; empty if it has none.

    Lengths that had to be cut are repeated, so that they suffice for the whole output.
    """
    lengths = [min(length, longest) for length in item.lengths or ()]
    repeated = itertools.cycle(lengths) if tuple(lengths) != item.lengths else lengths
    return list(itertools.islice(repeated, item.max_new_tokens if lengths else 0))


def _median(timings: Sequence[Parts]) -> Parts:
    return Parts(
        draft_ms=statistics.median(timing.draft_ms for timing in timings),
        verify_ms=statistics.median(timing.verify_ms for timing in timings),
        context_tokens=timings[0].context_tokens,
    )


def prepare(
    config: BenchmarkRun,
    *,
    target: Decoder | None = None,
    dry: bool = False,
) -> Bench:
    """Builds all models, reads all prompts, and checks that they fit together.

    Args:
      target: Loaded target to share; None builds one.
      dry: Prepare a plan only: use no device and download no checkpoint.
    """
    prepared = prepare_models(config, target, dry=dry)
    work = workloads.read(config, prepared[BASELINE.name])
    if work.forced and config.decode.num_pages is not None:
        raise errors.ConfigError(
            "decode.num_pages: a preempted sequence would lose its forced acceptance lengths; "
            "leave it unset"
        )
    ready = {name: jobs.with_prompts(job, work.prompts) for name, job in prepared.items()}
    bench = Bench(config, ready, work, target_loaded=target is not None)
    drafting = {name: size for name, size in bench.longest_paths.items() if size > 1}
    workloads.check_lengths(work, drafting)
    return bench


def prepare_models(
    config: BenchmarkRun, target: Decoder | None = None, *, dry: bool = False
) -> dict[str, jobs.Job]:
    """Returns a job for each strategy, the baseline first; all share one target."""
    strategies = with_baseline(config.strategies)
    prepared = {}
    for name, drafter in strategies.items():
        job = jobs.prepare_models(config.decode_run(drafter), dry=dry)
        target = target or job.target
        prepared[name] = dataclasses.replace(job, target=target)
    return prepared


def with_baseline(strategies: Mapping[str, DrafterConfig]) -> dict[str, DrafterConfig]:
    """Returns the strategies after the baseline; raises ConfigError if another has its name."""
    if strategies.get(BASELINE.name, BASELINE) != BASELINE:
        raise errors.ConfigError(
            f"strategies.{BASELINE.name}: this is the name of the baseline, which drafts nothing; "
            "choose another name"
        )
    return {BASELINE.name: BASELINE, **strategies}
