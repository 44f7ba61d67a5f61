"""Training run, from its work directory to its exported weights."""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from dflash import errors
from dflash.checkpoints import files as checkpoint_files
from dflash.config import checks
from dflash.parallel import agreement
from dflash.runs.directory import CONFIG, RunDirectory
from dflash.storage import files
from dflash.training import answer_check, rundir
from dflash.training import state as states
from dflash.training import step as steps_lib
from dflash.training.checkpoints import Checkpoints, RestoredCheckpoint
from dflash.training.evaluation import Evaluation
from dflash.training.kept_features import KeptFeatures
from dflash.training.report import TrainReport
from dflash.training.state import Params, TrainState
from dflash.training.train_job import DraftingTest, TrainJob
from dflash.training.trainer import BatchIterator, LoopConfig, StepFunctions, Trainer, TrainOutcome


def run(job: TrainJob, directory: RunDirectory, drafting_test: DraftingTest | None) -> TrainOutcome:
    """Trains, from scratch or from the newest checkpoint in the directory.

    Args:
      drafting_test: Measures the mean acceptance length (τ); None skips the measurement.
    Raises:
      UserError: The data, weights or files are unusable, or training diverges.
    """
    _publish_export(directory)
    steps = job.steps()
    frozen = job.task.load_frozen(job.token_counts)
    keep_last = job.config.train.keep_last
    with Checkpoints(directory.path / rundir.CHECKPOINTS, keep_last=keep_last) as checkpoints:
        notes: list[str] = []
        start = _begin(job, directory, checkpoints, steps, notes.append)
        evaluation = Evaluation(job, frozen, drafting_test)
        loop = _loop_config(job, steps, evaluation)
        with _open_report(job, directory, steps, start.step, loop.evaluate_every) as report:
            for note in notes:
                report.note(note)
            if start.step == 0:
                for line in _check_answers(job):
                    report.note(line)
            train_step = _train_step(job, steps, start.state)
            trainer = Trainer(
                loop,
                StepFunctions(
                    train=lambda state, batch: train_step(state, frozen, batch),
                    evaluate=evaluation,
                    export=functools.partial(_export, job, directory),
                ),
                state=start.state,
                step=start.step,
                batches=_training_batches(job, frozen, start.metadata["data"]),
                sharding=job.sharding,
                checkpoints=checkpoints,
                metadata=start.metadata,
                report=report,
            )
            outcome = trainer.run()
            report.note(_finish(job, directory, start.step, outcome, steps))
    return outcome


def _check_answers(job: TrainJob) -> Iterator[str]:
    end_ids = job.task.target.arch.eos_token_id
    for rows in job.training_rows.corpora if jax.process_index() == 0 else ():
        name, _, _ = rows.corpus.name.partition("/")
        if name in checks.OWN_DATA:
            yield from answer_check.check(rows.corpus, end_ids).lines(rows.corpus.name)


def _begin(
    job: TrainJob, directory: RunDirectory, checkpoints: Checkpoints, steps: int, note
) -> RestoredCheckpoint:
    optimizer, _ = job.optimizer(steps)
    _, abstract = states.split(job.task.learner)
    checkpoint = checkpoints.restore(states.abstract(abstract, optimizer, job.sharding), note)
    if checkpoint is None:
        params = job.task.fresh_params()
        state = states.create(params, optimizer, job.config.train.seed, job.sharding)
        return RestoredCheckpoint(0, state, {"data": None, "identity": rundir.identity(job.config)})
    if not rundir.same_run(checkpoint.metadata.get("identity"), job.config):
        raise errors.WorkdirError(
            f"{directory.path}: the checkpoints do not belong to the config in {CONFIG}: use "
            "another --workdir, or delete this one"
        )
    note(f"continuing after step {checkpoint.step}")
    return checkpoint


def _open_report(
    job: TrainJob, directory: RunDirectory, steps: int, first_step: int, evaluate_every: int
) -> TrainReport:
    return TrainReport(
        directory.path if jax.process_index() == 0 else None,
        steps=steps,
        first_step=first_step,
        tokens_per_step=job.config.train.batch_size * job.config.data.length,
        evaluate_every=evaluate_every,
    )


def _train_step(job: TrainJob, steps: int, state: TrainState):
    optimizer, schedule = job.optimizer(steps)
    return steps_lib.make_train_step(
        job.task.loss,
        optimizer,
        schedule,
        dtype=job.task.dtype,
        accumulate_steps=job.config.optimizer.accumulate_steps,
        sharding=job.sharding,
        state=state,
    )


def _loop_config(job: TrainJob, steps: int, evaluation: Evaluation) -> LoopConfig:
    config = job.config
    return LoopConfig(
        steps=steps,
        rows=config.train.batch_size,
        log_every=config.train.log_every,
        checkpoint_every=config.train.checkpoint_every,
        evaluate_every=config.evaluation.every if evaluation.measures_something else 0,
        goal=evaluation.goal,
        evaluation=evaluation.fingerprint,
        patience=config.evaluation.patience,
    )


def _training_batches(job: TrainJob, frozen: Params, state: Any) -> BatchIterator:
    batches = job.batches(job.training_rows, state=state)
    agreement.check_same("data", batches.state())
    if job.config.train.keep_features is not None:
        return KeptFeatures(batches, job.task, frozen)
    return batches


def _export(job: TrainJob, directory: RunDirectory, params: Params, step: int) -> None:
    """Writes the weights to hf/.

    A crash at any moment leaves a complete export, in hf/ or in the directory that replaces it.
    """
    fresh = _fresh_export(directory)
    if jax.process_index() == 0:
        files.remove_tree(fresh)
    job.task.export(params, fresh, job.tokenizer_directory)
    _publish_export(directory)


def _publish_export(directory: RunDirectory) -> None:
    """Moves a complete new export into place, including one that a killed run left behind."""
    fresh, final = _fresh_export(directory), directory.path / rundir.EXPORT
    if jax.process_index() == 0 and _is_export(fresh):
        with files.explained(final):
            files.publish(fresh, final, checkpoint_files.CONFIG)
    agreement.barrier("export published")


def _fresh_export(directory: RunDirectory) -> pathlib.Path:
    return directory.path / f".{rundir.EXPORT}.new"


def _is_export(path: pathlib.Path) -> bool:
    return (path / checkpoint_files.CONFIG).is_file()


def _finish(
    job: TrainJob, directory: RunDirectory, first_step: int, outcome: TrainOutcome, steps: int
) -> str:
    if outcome.step < steps and not outcome.stalled:
        return f"stopped after step {outcome.step} of {steps}; run the same command to continue"
    export = directory.path / rundir.EXPORT
    if _is_export(export) and first_step == steps:
        return f"all {steps} steps are already done; the weights are in {export}"
    if outcome.stalled:
        return (
            f"stopped early after step {outcome.step} of {steps}: no better score in "
            f"{job.config.evaluation.patience} evaluations (evaluation.patience); the best "
            f"weights, of step {outcome.best['step']}, are in {export}"
        )
    if not (_is_export(export) and outcome.best):
        _export(job, directory, outcome.state.params, outcome.step)
        return f"done: the weights of step {outcome.step} are in {export}"
    return f"done: the best weights, of step {outcome.best['step']}, are in {export}"
