"""A benchmark before and while it runs: one target, many strategies, prompts decoded in turn."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.schema import DrafterConfig
from dflash.inference.engine import NUM_STOP_IDS
from dflash.inference.request import Completion, Request, Sampling
from dflash.loading import job as jobs
from dflash.loading import weights
from dflash.measure import workload as workloads
from dflash.measure.engine import MeasuredEngine
from dflash.measure.forced import Forced
from dflash.measure.parts import Parts, Probe
from dflash.measure.samples import Sample, TaskRound
from dflash.measure.workload import Item, Workload
from dflash.models.decoder import Decoder
from dflash.offline import decode_run
from dflash.offline.decoding import decode
from dflash.runs.shards import Shard

BASELINE = DrafterConfig()  # the default strategy drafts nothing

# Called before each step of a run: what it does, and the share of the run that is done.
Progress = Callable[[str, float], None]


def quiet(what: str, done: float) -> None:
    """A `Progress` that shows nothing."""


class Bench:
    """One target with its weights, and an engine per strategy; the baseline comes first.

    To be called in this order: `load`, `converse`, `compile`, `warm_up`, `run`.
    """

    def __init__(
        self,
        config: BenchmarkRun,
        strategies: Mapping[str, jobs.Job],
        workload: Workload,
        *,
        target_loaded: bool,
    ):
        """Use `prepare`."""
        self._target_loaded = target_loaded
        self.config = config
        self.workload = workload
        self.jobs = dict(strategies)
        self.engines: dict[str, MeasuredEngine] = {}

    @property
    def baseline(self) -> str:
        """Name of the strategy that all others are compared with."""
        return next(iter(self.jobs))

    @property
    def target(self):
        """The target, shared by all strategies."""
        return self.jobs[self.baseline].target

    @property
    def block_sizes(self) -> dict[str, int]:
        """Rows that the target verifies, by strategy."""
        return {name: job.drafter.block_size for name, job in self.jobs.items()}

    @property
    def longest_paths(self) -> dict[str, int]:
        """The most tokens that a cycle may commit, by strategy."""
        return {name: job.drafter.longest_path for name, job in self.jobs.items()}

    def divide(self, shard: Shard) -> None:
        """Keeps a shard's part of every task alone.

        Raises:
          ConfigError: there are fewer prompts than shards.
        """
        self.workload = self.workload.of_shard(shard)
        if not self.workload.tasks:
            raise errors.ConfigError(f"--shard={shard}: no task has so many prompts")
        prompts = tuple(item.prompt for item in self.workload.items)
        self.jobs = {
            name: dataclasses.replace(job, prompts=prompts) for name, job in self.jobs.items()
        }

    def load(self) -> None:
        """Reads all weights; the target's once, unless it came with them."""
        if not self._target_loaded:
            source = self.jobs[self.baseline].target_source
            weights.load(self.target, source, self.target.sharding)
        for job in self.jobs.values():
            weights.load(job.drafter, job.drafter_source, self.target.sharding)

    def converse(self) -> None:
        """Turns the later turns of conversations into prompts of their own.

        Each follows the baseline's answers, whichever strategy decodes it, so that all strategies
        decode the same prompts.

        Raises:
          InputError: a conversation has grown too long.
        """
        turns = decode_run.all_turns(self.jobs[self.baseline])
        self.workload = self.workload.with_turns(turns)
        self.jobs = {name: jobs.with_prompts(job, turns) for name, job in self.jobs.items()}

    def compile(self, progress=lambda ready, total: None) -> None:
        """Makes the engines and compiles all programs of all strategies; see `Engine.compile`."""
        lengths = [len(item.prompt.ids) for item in self.workload.items]
        self.engines = {name: self._engine(job) for name, job in self.jobs.items()}
        counts = {name: len(one.program_names(lengths)) for name, one in self.engines.items()}
        before, total = 0, sum(counts.values())
        for name, engine in self.engines.items():
            engine.compile(lengths, lambda ready, _, before=before: progress(before + ready, total))
            before += counts[name]

    def _engine(self, job: jobs.Job) -> MeasuredEngine:
        if not self.workload.forced:
            return make_engine(job)
        sequences = max(map(len, self.workload.tasks.values()))
        cycles = max(item.max_new_tokens for item in self.workload.items)
        return make_engine(job, script=(sequences, cycles))

    def warm_up(self) -> None:
        """Decodes some prompts of each task with every strategy and times parts; drops all."""
        for task in self.workload.tasks:
            first = self.queues(task)[0][: self.config.decode.batch_size]
            self.task_round(task, 0, [first])

    def queues(self, task: str) -> list[tuple[Item, ...]]:
        """The task's prompts, as they are queued together; see `Workload.queues`."""
        return self.workload.queues(task, self.config.decode.batch_size)

    def decode(self, strategy: str, queue: Sequence[Item]) -> tuple[Completion, ...]:
        """Decodes a queue of prompts; a slot that is free takes the next one."""
        engine = self.engines[strategy]
        engine.follow([script(item, self.longest_paths[strategy]) for item in queue])
        events = decode(engine, [self.request(item) for item in queue])
        done = [event for event in events if isinstance(event, Completion)]
        return tuple(sorted(done, key=lambda one: one.id))

    def request(self, item: Item, at_most: int | None = None) -> Request:
        """What an item asks of an engine, cut to `at_most` new tokens."""
        index = item.prompt.index
        new_tokens = min(item.max_new_tokens, at_most or item.max_new_tokens)
        # Forced acceptance commits whatever was drafted; a stop token in it means nothing.
        stop_ids = () if self.workload.forced else self.jobs[self.baseline].stop_ids
        sampling = Sampling.from_config(self.config.decode, index)
        return Request(index, item.prompt.ids, new_tokens, sampling, stop_ids)

    def marks(self, queue: Sequence[Item], done: Sequence[Completion]) -> tuple[bool | None, ...]:
        """Whether each output has the right answer; None where its prompt has none."""
        words = self.jobs[self.baseline].tokenizer
        return tuple(
            item.grader(words.decode(one.output_ids), finished=one.finish_reason == "stop")
            if item.grader
            else None
            for item, one in zip(queue, done, strict=True)
        )

    def run(self, progress: Progress = quiet) -> Iterator[TaskRound]:
        """Measures: strategies take turns queue by queue, so that drift affects all equally.

        The parts of each strategy's cycle are timed between the queues, for the same reason.

        Args:
          progress: called before each step, with words, and the share of the run that is done.
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
        """One round over some of a task's prompts, as `queues` gives them."""
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
            # As often as the slots were filled.
            for _ in range(math.ceil(len(queue) / self.config.decode.batch_size)):
                for name, probe in probes.items():
                    times.setdefault(name, []).append(probe.parts())
        parts = {name: _median(some) for name, some in times.items()}
        return TaskRound(task, number, tuple(samples), parts)

    def _probes(self, queue: Sequence[Item], plain: Sample) -> dict[str, Probe]:
        """Probes in the middle of the first prompt's output, as the baseline has it."""
        output = plain.completions[0].output_ids
        context = (*queue[0].prompt.ids, *output[: len(output) // 2])
        probes = {
            name: Probe.behind(engine, context)
            for name, engine in self.engines.items()
            if engine.has_parts
        }
        for probe in probes.values():
            probe.parts()  # its first call is slower than all others
        return probes


def make_engine(
    job: jobs.Job, *, script: tuple[int, int] | None = None, num_stop_ids: int = NUM_STOP_IDS
) -> MeasuredEngine:
    """An engine over a job's models.

    Args:
      job: a strategy's.
      script: sequences and cycles of the longest script of acceptance lengths that is to be forced
        upon its drafts; None: they are accepted as they are.
      num_stop_ids: stop ids that a request may have.
    """
    drafter = job.drafter
    if script is not None and drafter.num_draft_tokens:
        sequences, cycles = script
        sharding = job.target.sharding
        drafter = Forced(drafter, sequences=sequences, cycles=cycles, sharding=sharding)
    return MeasuredEngine(
        job.target,
        drafter,
        job.config.decode,
        max_length=job.max_length,
        adaptive_blocks=job.config.drafter.adaptive,
        num_stop_ids=max(num_stop_ids, len(job.stop_ids)),
    )


def script(item: Item, longest: int) -> list[int]:
    """The item's acceptance lengths, none over `longest`; empty where none are given.

    Lengths that were cut are repeated, so that they last to the end of the output.
    """
    lengths = [min(length, longest) for length in item.lengths or ()]
    repeated = itertools.cycle(lengths) if tuple(lengths) != item.lengths else lengths
    return list(itertools.islice(repeated, item.max_new_tokens if lengths else 0))


def _median(some: Sequence[Parts]) -> Parts:
    """The medians of several timings."""
    return Parts(
        draft_ms=statistics.median(one.draft_ms for one in some),
        verify_ms=statistics.median(one.verify_ms for one in some),
        context_tokens=some[0].context_tokens,
    )


def prepare(
    config: BenchmarkRun,
    *,
    cut: bool = False,
    target: Decoder | None = None,
    dry: bool = False,
) -> Bench:
    """Finds and builds all models, reads all prompts, and checks that they fit together.

    Args:
      config: of the run.
      cut: let forced acceptance lengths exceed a strategy's block, which then cuts them.
      target: to be shared, with its weights; None to build one.
      dry: for a plan only: touches no device and downloads no checkpoint.
    Raises:
      UserError: whatever is wrong.
    """
    prepared = prepare_models(config, target, dry=dry)
    work = workloads.read(config, prepared[BASELINE.name])
    if work.forced and config.decode.num_pages is not None:
        raise errors.ConfigError(
            "decode.num_pages: forced acceptance lengths do not survive the interruption of a "
            "sequence; leave it unset"
        )
    prompts = [item.prompt for item in work.items]
    ready = {name: jobs.with_prompts(job, prompts) for name, job in prepared.items()}
    bench = Bench(config, ready, work, target_loaded=target is not None)
    if not cut:
        drafting = {name: size for name, size in bench.longest_paths.items() if size > 1}
        workloads.check_lengths(work, drafting)
    return bench


def prepare_models(
    config: BenchmarkRun, target: Decoder | None = None, *, dry: bool = False
) -> dict[str, jobs.Job]:
    """A job per strategy, the baseline first, all with one target: `target` if that is given."""
    strategies = with_baseline(config.strategies)
    prepared = {}
    for name, drafter in strategies.items():
        job = jobs.prepare_models(config.decode_run(drafter), dry=dry)
        target = target or job.target
        prepared[name] = dataclasses.replace(job, target=target)
    return prepared


def with_baseline(strategies: Mapping[str, DrafterConfig]) -> dict[str, DrafterConfig]:
    """The strategies, preceded by the baseline under its own name.

    Raises:
      ConfigError: another strategy has taken that name.
    """
    if strategies.get(BASELINE.name, BASELINE) != BASELINE:
        raise errors.ConfigError(
            f"strategies.{BASELINE.name}: the name of the baseline, which drafts nothing; "
            "give the strategy another"
        )
    return {BASELINE.name: BASELINE, **strategies}
