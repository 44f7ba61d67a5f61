"""Plan of a distillation: memory of its two programs, and time and disk space of every stage.

Times are lower bounds at the peak rates of the chip; real runs take two to four times as long.
Amounts that depend on the length of the answers are upper bounds.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from dflash import errors
from dflash.config.distill_schema import DistillRun
from dflash.config.schema import DecodeRun, PromptsConfig
from dflash.config.train_schema import TrainRun
from dflash.loading import job as decode_jobs
from dflash.loading import models
from dflash.loading.job import Job
from dflash.loading.job import Job as DecodeJob
from dflash.measure import roofline
from dflash.measure.roofline import ForwardWork, Machine
from dflash.parallel import chips, parameters
from dflash.storage import paths
from dflash.text import jsonl, prompts
from dflash.training import train_job as training_jobs
from dflash.training.train_job import TrainJob
from dflash.training.train_plan import step_flops

_BYTES_PER_TOKEN = 2 * 8 + 4  # Of an answer, stored twice as JSON and as training rows.
_OPTIMIZER_COPIES = 3  # Float32 arrays per weight in a checkpoint: the weight and two moments.


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """Time and disk space of a stage.

    Attributes:
      seconds: Lower bound of its time, in seconds; None if the chip is unknown.
      disk_bytes: Upper bound of the bytes that it leaves on disk.
    """

    name: str
    amount: str
    seconds: float | None
    disk_bytes: int


def make(config: DistillRun, *, answers: str, dry: bool) -> list[str]:
    """Builds and checks the models of all stages without weights, and plans the stages.

    Args:
      dry: Use no device and download nothing; the chip is then `plan.chip` or unknown.
    Raises:
      UserError: The models do not fit each other or the config.
    """
    decoding = _decode_job(config.answer_run(PromptsConfig()), dry)
    training = training_jobs.prepare(config.train_run(answers), dry=True)
    described = list(describe_questions(config, decoding))  # Raises before steps are traced.
    machine = _machine(config, None if dry else decoding)
    stages = [
        _answers(config, decoding, machine),
        _training(config, training, machine),
        _test(config, decoding, training, machine),
        _export(training),
    ]
    return [
        "questions",
        *described,
        "",
        "answers: decoding with the target",
        *decoding.plan().lines(),
        "",
        "training",
        *training.plan().lines(),
        "",
        *_table(stages, machine),
    ]


_SHOWN_CHARACTERS = 1000


def describe_questions(config: DistillRun, job: Job) -> Iterator[str]:
    """Yields the sources of the questions, how texts are formatted, and one rendered prompt.

    Args:
      job: Decode job of the answers, without prompts.
    Raises:
      ConfigError: Texts are to go through a chat template that the checkpoint lacks.
      InputError: A file cannot be read.
    """
    answers = config.answers
    if answers.made is not None:
        yield f"  answered already, in {answers.made}"
        return
    for file in answers.files:
        yield from _question_file(file)
    downloaded = job.target_source.directory or config.target.checkpoint == models.RANDOM
    yield f"  {_format(config, job) if downloaded else 'format unknown without the checkpoint'}"
    if downloaded:
        yield from _example(config, job)


def _question_file(file: str) -> Iterator[str]:
    """Yields the number of lines of a file, and of the reference answers that are dropped."""
    lines = answered = 0
    for _, read in jsonl.entries(file):
        lines += 1
        try:
            answered += prompts.ends_with_answer(read())
        except errors.InputError:
            continue  # The stage that needs the line reports it.
    yield f"  {file}: {lines:,} line{'' if lines == 1 else 's'}"
    if answered:
        yield f"    {answered:,} end with a reference answer, which is dropped"


def _format(config: DistillRun, job: Job) -> str:
    if prompts.in_chat(config.answers.chat, job.tokenizer):
        if not job.tokenizer.has_chat_template:
            raise errors.ConfigError(
                f"answers.chat: true, but {config.target.checkpoint} has no chat template; "
                "answers.chat=false decodes texts as they are"
            )
        return "texts go through the chat template (answers.chat=false turns it off)"
    if config.answers.chat is None:
        return "texts are decoded as they are, since the checkpoint has no chat template"
    return "texts are decoded as they are, without the chat template (answers.chat=false)"


def _example(config: DistillRun, job: Job) -> Iterator[str]:
    """Yields the first question as the target reads it, special tokens included."""
    vocab_size = job.target.arch.vocab_size
    source = PromptsConfig(file=config.answers.files[0], chat=config.answers.chat)
    first = prompts.read_first(source, job.tokenizer, vocab_size=vocab_size)
    if first is None:
        return
    text = job.tokenizer.decode(first.ids, special_tokens=True)
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    yield "  the first one, as the target reads it:"
    for line in shown.splitlines():
        yield f"    | {line}"


def _decode_job(run: DecodeRun, dry: bool) -> DecodeJob:
    """Returns the job of a run without its prompts, which are not read for a plan."""
    job = decode_jobs.prepare_models(run, dry=dry)
    longest = run.decode.prefill_chunk + run.decode.max_new_tokens
    return dataclasses.replace(job, max_length=run.decode.max_length or longest)


def _machine(config: DistillRun, job: DecodeJob | None) -> Machine | None:
    if config.plan.chip is not None:
        chip = chips.find(config.plan.chip)
        devices = math.prod(vars(config.mesh).values())
        return roofline.machine_of_chip(chip, devices, chip.name)
    return None if job is None else roofline.machine_of(job.target.sharding)


def _answers(config: DistillRun, job: DecodeJob, machine: Machine | None) -> StageEstimate:
    decode, count = job.config.decode, _num_questions(config)
    if config.answers.made is not None:
        size = paths.to_path(config.answers.made).stat().st_size
        return StageEstimate("answers", f"{count:,} existing ones", 0.0, size)
    tokens = count * decode.max_new_tokens
    context = config.plan.prompt_tokens + decode.max_new_tokens // 2
    forward = roofline.target_work(
        job.target, batch=decode.batch_size, rows=1, context=context, kv_dtype=decode.kv_dtype
    )
    seconds = _seconds(forward, tokens / decode.batch_size, machine)
    stored = count * (config.plan.prompt_tokens + decode.max_new_tokens) * _BYTES_PER_TOKEN
    amount = f"{count:,} questions, at most {decode.max_new_tokens:,} tokens each"
    return StageEstimate("answers", amount, seconds, stored)


def _num_questions(config: DistillRun) -> int:
    """Returns the number of questions of all files, or of existing answers."""
    if config.answers.made is not None:
        return sum(1 for _ in jsonl.entries(config.answers.made))
    return sum(1 for file in config.answers.files for _ in jsonl.entries(file))


def _training(config: DistillRun, job: TrainJob, machine: Machine | None) -> StageEstimate:
    run: TrainRun = job.config
    row = run.train.batch_size * run.data.length
    steps = run.train.steps
    answer = config.plan.prompt_tokens + config.answers.decode.max_new_tokens
    longest = min(answer, run.data.length)
    per_epoch = _num_questions(config) * longest
    share = config.data.shares.get("jsonl", 1.0) / (sum(config.data.shares.values()) or 1.0)
    if steps is None:
        steps = math.ceil(run.train.epochs * per_epoch / share / row)
    bound = "" if run.train.steps else "at most "  # answers may be shorter
    amount = f"{bound}{steps:,} steps of {row:,} tokens"
    work = ForwardWork(step_flops(job.task), 0.0)
    learning = parameters.count(job.task.learner)
    num_checkpoints = run.train.keep_last + 2  # The best one, and one that is being written.
    disk = num_checkpoints * _OPTIMIZER_COPIES * 4 * learning
    return StageEstimate("training", amount, _seconds(work, steps, machine), disk)


def _test(
    config: DistillRun, decoding: DecodeJob, training: TrainJob, machine: Machine | None
) -> StageEstimate:
    test = config.test
    runs = list(config.test_runs(None).values())
    prompts = len(runs) * test.prompts
    if not prompts:
        return StageEstimate("test", "none: test.tasks is empty", 0.0, 0)
    for run in runs[: len(runs) // len(test.tasks)]:  # Runs of the first data set.
        decode_jobs.prepare_models(run, dry=True)  # Raises if sizes do not fit.
    slots = runs[0].decode.batch_size
    forward = roofline.target_work(
        decoding.target, batch=slots, rows=1, context=config.plan.prompt_tokens
    )
    tokens = prompts * test.decode.max_new_tokens
    amount = f"{prompts:,} prompts, with the drafter and without"
    stored = 2 * tokens * _BYTES_PER_TOKEN
    # Assume that the run with drafts takes at most as long as the plain one.
    return StageEstimate("test", amount, _seconds(forward, 2 * tokens / slots, machine), stored)


def _export(job: TrainJob) -> StageEstimate:
    size = 2 if job.config.train.export_dtype == "bfloat16" else 4
    weights = parameters.count(job.task.learner)
    return StageEstimate("export", f"{weights:,} weights", 0.0, 2 * size * weights)


def _seconds(work: ForwardWork, times: float, machine: Machine | None) -> float | None:
    return None if machine is None else work.ideal_ms(machine) * times / 1e3


def _table(stages: Sequence[StageEstimate], machine: Machine | None) -> Iterator[str]:
    yield f"{'stage':<12}{'at least':>10}{'disk':>12}   amount"
    for stage in stages:
        yield (
            f"  {stage.name:<10}{_duration(stage.seconds):>10}{_size(stage.disk_bytes):>12}"
            f"   {stage.amount}"
        )
    disk = sum(stage.disk_bytes for stage in stages)
    times = [stage.seconds for stage in stages]
    total = None if None in times else sum(times)
    yield f"  {'all':<10}{_duration(total):>10}{_size(disk):>12}"
    if machine is None:
        yield "times       unknown: give plan.chip, such as plan.chip=v5p"
    else:
        yield f"times       at the peaks of {machine.name} ({machine.source});"
        yield "            expect two to four times as long"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _size(size_bytes: int) -> str:
    for unit, power in (("KB", 3), ("MB", 6), ("GB", 9)):
        if size_bytes < 10 ** (power + 3):
            return f"{size_bytes / 10**power:.1f} {unit}"
    return f"{size_bytes / 1e12:.1f} TB"
