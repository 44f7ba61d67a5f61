"""Stages of a distillation; a stage is skipped if its last file exists.

    WORKDIR/answers/NAME/    decode run for each source of questions
    WORKDIR/answers.jsonl    all answers, in the order of the questions
    WORKDIR/training/        training run on the answers
    WORKDIR/trained.json     results of training
    WORKDIR/test/TASK/       decode run with the drafter, and without, on held-out prompts;
                             TASK-blockN/ with blocks of N rows, TASK-treeN/ with N drafts a tree
    WORKDIR/test.json        mean acceptance length (τ) and speed-up by data set
    WORKDIR/drafter/         weights in the Hugging Face layout, and a model card

The last file or directory of a stage is written atomically when the stage is done. Within a stage,
runs resume as they do on their own, so a kill at any point does not change the result.
"""

import dataclasses
import datetime
import io
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from dflash.checkpoints import files as checkpoint_files
from dflash.config import distill_schema
from dflash.config.distill_schema import DistillRun
from dflash.config.schema import DecodeRun
from dflash.config.train_schema import TrainRun
from dflash.distillation import card, distill_plan
from dflash.loading import job as decode_jobs
from dflash.offline import decode_run as decoding
from dflash.offline.decode_sweep import Weights
from dflash.offline.evaluation import DraftingTest
from dflash.parallel import agreement, distributed, parameters
from dflash.runs import records
from dflash.runs.directory import RunDirectory
from dflash.runs.display import Display
from dflash.storage import files, paths
from dflash.training import rundir
from dflash.training import train_job as training_jobs
from dflash.training import train_run as training

ANSWERS, TRAINED, TESTED, DRAFTER = "answers.jsonl", "trained.json", "test.json", "drafter"
TESTS = "test"  # Directory of the decode runs that measure the drafter.
_TRAINING = "training"  # Directory of the training run.
_REPORT_SECONDS = 30.0  # Seconds between two lines of progress.


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Distillation in its work directory.

    Attributes:
      path: Absolute path of the work directory, which this run has locked.
      date: Date of the run, which chat templates may print.
    """

    config: DistillRun
    path: pathlib.Path
    date: datetime.date
    display: Display

    @property
    def train_run(self) -> TrainRun:
        """Returns the config of the training run on the answers of this directory."""
        return self.config.train_run(str(self.path / ANSWERS))

    @property
    def training(self) -> pathlib.Path:
        """Returns the directory of the training run."""
        return self.path / _TRAINING

    @property
    def weights(self) -> pathlib.Path:
        """Returns the directory of the best weights of the training run."""
        return self.training / rundir.EXPORT

    def decode(self, run: DecodeRun, name: str, load: Weights) -> dict[str, Any]:
        """Decodes the unfinished prompts of a run, and returns its results."""
        job = decode_jobs.prepare(run, stdin=io.StringIO(), date=self.date)
        first = jax.process_index() == 0
        with decoding.open_records(self.path / name, run, self.date) as store:
            total = sum(len(prompt.indices) for prompt in job.prompts)
            progress = _Progress(name, total, len(store.drafted.completed()))
            display = progress if first else Display.silent()
            return decoding.run(job, store, display, load=load)

    def read(self, name: str) -> dict[str, Any]:
        """Returns the content of the last file of an earlier stage."""
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def finish(self, name: str, content: dict[str, Any]) -> None:
        """Writes the last file of a stage; raises WorkdirError if that fails."""
        if jax.process_index() == 0:
            with files.explained(self.path / name):
                files.write_whole(self.path / name, files.to_json(content))
        agreement.barrier(f"{name} written")


@dataclasses.dataclass(frozen=True)
class Stage:
    """Stage of a distillation.

    Attributes:
      end: Last file or directory, which exists once the stage is done.
      run: Runs the stage, and returns an exit status; it is not 0 if a signal stopped it.
    """

    name: str
    end: str
    run: Callable[[Distillation], int]


def run(config: DistillRun, directory: RunDirectory, date: datetime.date, display: Display) -> int:
    """Runs the unfinished stages.

    Returns:
      Exit status: 0 if all stages are done, or 128 + the number of the signal that stopped
      training.
    Raises:
      UserError: Questions, checkpoints or files are unusable, or training diverges.
    """
    path = paths.absolute(directory.path)
    distillation = Distillation(config, path, date, display)
    # Ask process 0 for the state of the files, since only that process writes them.
    if not distributed.broadcast(is_used(path)):
        for line in distill_plan.make(config, answers=str(path / ANSWERS), dry=False):
            distillation.display.note(line)
    for stage in STAGES:
        if distributed.broadcast((path / stage.end).exists()):
            distillation.display.note(f"{stage.name}: already done")
            continue
        distillation.display.note(f"{stage.name}: begins")
        status = stage.run(distillation)
        if status:
            return status
    distillation.display.note(f"done: {path / DRAFTER} holds the drafter and its model card")
    return 0


def open_directory(
    path: str | os.PathLike, config: DistillRun, date: datetime.date
) -> RunDirectory:
    """Locks the work directory of a distillation; see `RunDirectory` for the errors."""
    return RunDirectory(path, config, is_used=is_used, may_change=distill_schema.is_free, date=date)


def is_used(directory: pathlib.Path) -> bool:
    """Returns whether a distillation has started in a directory.

    A file of answers alone does not count, since another distillation may have left it.
    """
    return any((directory / name).exists() for name in ("answers", _TRAINING, DRAFTER))


def _answer(distillation: Distillation) -> int:
    load, runs = Weights(Display.silent()), distillation.config.answer_runs()
    for name, run in runs.items():
        distillation.decode(run, f"answers/{name}", load)
    if jax.process_index() == 0:
        existing, destination = distillation.config.answers.made, distillation.path / ANSWERS
        with files.explained(existing or destination):
            directory = distillation.path / "answers"
            lines = _all_answers(directory, list(runs)) if runs else _lines(existing)
            files.write_whole(destination, lines)
    agreement.barrier(f"{ANSWERS} written")
    return 0


def _train(distillation: Distillation) -> int:
    job = training_jobs.prepare(distillation.train_run, date=distillation.date)
    with rundir.open_directory(
        distillation.training, distillation.train_run, distillation.date
    ) as directory:
        outcome = training.run(job, directory, job.drafting_test(DraftingTest))
    if outcome.exit_status:
        return outcome.exit_status
    ended = {"steps": outcome.step, "best": outcome.best}
    weights, step_s = parameters.count(job.task.learner), _step_seconds(distillation)
    distillation.finish(TRAINED, {**ended, "weights": weights, "step_seconds": step_s})
    return 0


def _test(distillation: Distillation) -> int:
    load = Weights(Display.silent())
    keys = ("tau", "acceptance_histogram", "tokens_per_second", "prompts", "answers")
    keys, tested = (*keys, "baseline", "devices"), {}
    for name, run in distillation.config.test_runs(str(distillation.weights)).items():
        results = distillation.decode(run, f"{TESTS}/{name}", load)
        tested[name] = {key: results[key] for key in keys} | {"slots": run.decode.batch_size}
    distillation.finish(TESTED, tested)
    return 0


def _export(distillation: Distillation) -> int:
    with (distillation.path / ANSWERS).open("rb") as lines:
        lengths = [len(json.loads(line)["output_ids"]) for line in lines]
    trained, tested = distillation.read(TRAINED), distillation.read(TESTED)
    text = card.write(distillation.config, lengths, trained, tested)
    with checkpoint_files.staged(distillation.path / DRAFTER) as directory:
        if jax.process_index() == 0:
            files.copy_tree(distillation.weights, directory, checkpoint_files.CONFIG)
            (directory / "README.md").write_text(text, encoding="utf-8")
    return 0


STAGES = (
    Stage("answers", ANSWERS, _answer),
    Stage("training", TRAINED, _train),
    Stage("test", TESTED, _test),
    Stage("export", DRAFTER, _export),
)


def _all_answers(directory: pathlib.Path, names: list[str]) -> Iterator[bytes]:
    """Yields the token ids of all answers as lines of training data, in order of the questions."""
    for name in names:
        for record in records.read(directory / name / records.OUTPUTS):
            ids = {"prompt_ids": record.prompt_ids, "output_ids": record.output_ids}
            yield json.dumps(ids, separators=(",", ":")).encode() + b"\n"


def _lines(path: str) -> Iterator[bytes]:
    with paths.to_path(path).open("rb") as lines:
        yield from lines


def _step_seconds(distillation: Distillation) -> float | None:
    """Returns the time of a training step from the median logged rate; None without a log."""
    tokens = distillation.config.train.batch_size * distillation.config.data.length
    lines = (distillation.training / rundir.METRICS).read_text(encoding="utf-8").splitlines()
    rates = [json.loads(line).get("tokens_per_second") for line in lines]
    rates = [rate for rate in rates if rate]
    return tokens / statistics.median(rates) if rates else None


class _Progress(Display):
    """Display that counts finished prompts and text, with a line of progress now and then."""

    def __init__(self, name: str, total: int, done: int):
        """Creates the display; earlier starts have finished `done` of the prompts."""
        super().__init__(stream=False)
        self._name, self._total, self._done, self._characters = name, total, done, 0
        self._reported = time.monotonic()

    def token(self, index: int, text: str) -> None:
        """Counts a piece of an output, since it may take long until the first one is finished."""
        del index
        self._characters += len(text)
        self._report()

    def finish(self, index: int, summary: str) -> None:
        """Counts a finished prompt."""
        del index, summary
        self._done += 1
        self._report()

    def _report(self) -> None:
        now = time.monotonic()
        if self._done == self._total or now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            self.note(
                f"{self._name}: {self._done} of {self._total} prompts, "
                f"{self._characters:,} characters of text"
            )

    def results(self, *unused) -> None:
        """Shows nothing, since the model card has the results."""

    def comparison(self, *unused) -> None:
        """Shows nothing."""
