"""A training run, from its work directory to its exported weights."""

import functools
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from dflash import errors
from dflash.config import loader
from dflash.runs import files
from dflash.runs.directory import CONFIG, RunDirectory
from dflash.training import features, rundir
from dflash.training import state as states
from dflash.training import step as steps_lib
from dflash.training.checkpoints import Checkpoints, Restored
from dflash.training.evaluation import DraftingTest, Evaluation
from dflash.training.job import Job
from dflash.training.report import Report
from dflash.training.state import Params, TrainState
from dflash.training.trainer import Batches, Course, Outcome, Tools, Trainer


def run(job: Job, directory: RunDirectory, drafting_test: DraftingTest | None) -> Outcome:
    """Trains, from scratch or from where an earlier run on the directory stood.

    Args:
      job: what to train.
      directory: taken.
      drafting_test: measures τ; None where nothing drafts.
    Raises:
      UserError: something is wrong with data, weights, numbers or files.
    """
    steps = job.steps()
    frozen = job.task.load_frozen(job.token_counts)
    keep_last = job.config.train.keep_last
    with Checkpoints(directory.path / rundir.CHECKPOINTS, keep_last=keep_last) as checkpoints:
        notes: list[str] = []
        start = _begin(job, directory, checkpoints, steps, notes.append)
        with _open_report(job, directory, steps, start.step) as report:
            for note in notes:
                report.note(note)
            trainer = Trainer(
                _course(job, steps),
                Tools(
                    step=_train_step(job, steps, start.state),
                    frozen=frozen,
                    evaluate=Evaluation(job, frozen, drafting_test),
                    export=functools.partial(_export, job, directory),
                ),
                state=start.state,
                step=start.step,
                batches=_training_batches(job, directory, frozen, start.facts["data"], report),
                sharding=job.sharding,
                checkpoints=checkpoints,
                facts=start.facts,
                report=report,
            )
            outcome = trainer.run()
            exported = outcome.best and (directory.path / rundir.EXPORT).is_dir()
            if outcome.step == steps and not exported:
                _export(job, directory, outcome.state.params, outcome.step)
            report.note(_farewell(outcome, directory, steps))
    return outcome


def _begin(
    job: Job, directory: RunDirectory, checkpoints: Checkpoints, steps: int, tell
) -> Restored:
    """The newest good checkpoint, or else the state before the first step."""
    optimizer, _ = job.optimizer(steps)
    _, abstract = states.split(job.task.learner)
    found = checkpoints.restore(states.abstract(abstract, optimizer, job.sharding), tell)
    if found is None:
        params = job.task.fresh_params()
        state = states.create(params, optimizer, job.config.train.seed, job.sharding)
        return Restored(0, state, {"data": None, "identity": rundir.identity(job.config)})
    if not rundir.same_run(found.facts.get("identity"), job.config):
        raise errors.WorkdirError(
            f"{directory.path}: holds checkpoints of another config than its {CONFIG} "
            "says: use another --workdir, or delete this one"
        )
    tell(f"going on after step {found.step}")
    return found


def _open_report(job: Job, directory: RunDirectory, steps: int, first_step: int) -> Report:
    return Report(
        directory.path if jax.process_index() == 0 else None,
        steps=steps,
        first_step=first_step,
        tokens_per_step=job.config.train.batch_size * job.config.data.length,
    )


def _train_step(job: Job, steps: int, state: TrainState):
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


def _course(job: Job, steps: int) -> Course:
    config = job.config
    drafts = job.task.drafts and config.evaluation.prompts
    return Course(
        steps=steps,
        rows=config.train.batch_size,
        log_every=config.train.log_every,
        checkpoint_every=config.train.checkpoint_every,
        evaluate_every=config.evaluation.every if config.evaluation.batches or drafts else 0,
        goal="tau" if drafts else "loss",
    )


def _training_batches(
    job: Job, directory: RunDirectory, frozen: Params, state: Any, report: Report
) -> Batches:
    """The batches that the steps learn from, with features where those are cached."""
    config = job.config
    if config.train.features == "online" or not job.task.drafts:
        return job.batches("train", state)
    base = pathlib.Path(config.train.feature_cache or directory.path / rundir.FEATURES)
    share, shares = job.share
    compute = steps_lib.make_feature_step(job.task.features, dtype=job.task.dtype)
    total = job.batches_per_epoch()

    def features_of(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        placed = steps_lib.place(batch, job.sharding, config.train.batch_size)
        return {name: _local_rows(x) for name, x in compute(frozen, placed).items()}

    cache = features.open_cache(
        base / _cache_key(job),
        share=share,
        shares=shares,
        num_batches=total,
        batches=lambda state: job.batches("train", state),
        compute=features_of,
        progress=lambda done: report.note(f"features: {done}/{total} batches"),
    )
    return features.CachedBatches(cache, job.rows, config.data.seed, state)


def _cache_key(job: Job) -> str:
    """Over everything that the rows and their features hang on."""
    source = job.task.target_source
    weights = features.fingerprint(source.directory) if source.directory else source.seed
    return features.cache_key(
        loader.non_defaults(job.config.target),
        loader.non_defaults(job.config.data),
        job.config.train.dtype,
        job.config.train.batch_size,
        job.task.working.feature_layers,
        job.config.loss.uses_target_hidden,
        job.tokenizer.fingerprint,
        weights,
    )


def _local_rows(array: jax.Array) -> np.ndarray:
    """This process's rows of an array that is split by rows, if at all."""
    pieces = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
    return np.concatenate([np.asarray(pieces[start].data) for start in sorted(pieces)])


def _export(job: Job, directory: RunDirectory, params: Params, step: int) -> None:
    """Writes the weights to hf/, which always holds a whole export: the old or the new."""
    final = directory.path / rundir.EXPORT
    fresh, old = final.with_name(f".{final.name}.new"), final.with_name(f".{final.name}.old")
    if jax.process_index() == 0:
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
    job.task.export(params, fresh, job.tokenizer_directory)
    if jax.process_index() == 0:
        with files.explained(final):
            if final.exists():
                final.rename(old)
            fresh.rename(final)
            shutil.rmtree(old, ignore_errors=True)


def _farewell(outcome: Outcome, directory: RunDirectory, steps: int) -> str:
    if outcome.step < steps:
        return f"stopped after step {outcome.step} of {steps}; the same command goes on from there"
    which = f"step {outcome.best['step']}, the best" if outcome.best else f"step {outcome.step}"
    return f"done: {directory.path / rundir.EXPORT} holds the weights of {which}"
