"""Prepared training run: abstract models, data and checks, before weights are loaded."""

import contextlib
import dataclasses
import datetime
import fractions
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config.schema import PromptsConfig
from dflash.config.train_schema import TrainRun
from dflash.data import datasets, mixture, store
from dflash.data.batches import Batches
from dflash.data.dataset import Dataset
from dflash.data.example import Example, Split
from dflash.data.mixture import Mixture
from dflash.parallel import agreement
from dflash.parallel import sharding as shardings
from dflash.parallel.sharding import Sharding
from dflash.storage import files
from dflash.text import prompts, tokenizer_loading
from dflash.text.tokenizer import Tokenizer
from dflash.training import step as steps_lib
from dflash.training import tasks, train_plan
from dflash.training.optimizer import make_optimizer, make_schedule
from dflash.training.state import Params
from dflash.training.tasks import Task

# Maps the learner's parameters in the compute dtype to metrics, including "tau".
DraftingTest = Callable[[Params], Mapping[str, float]]

COUNTED_TOKENS = 2**24
Prompt = Mapping[str, Any]  # "prompt_ids"; or "messages", "variables" and "place", as in `Example`


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """Prepared training run.

    Attributes:
      tokenizer_directory: Directory of the tokenizer's files, which are exported with the weights;
        None for plain bytes.
    """

    config: TrainRun
    sharding: Sharding
    task: Task
    tokenizer: Tokenizer
    tokenizer_directory: pathlib.Path | None

    def optimizer(self, steps: int) -> tuple[optax.GradientTransformation, Any]:
        """Returns the optimizer and its learning-rate schedule."""
        config = self.config.optimizer
        return make_optimizer(config, steps), make_schedule(config, steps)

    @functools.cached_property
    def _datasets(self) -> dict[str, Dataset]:
        return datasets.find_all(self.config.data)

    @functools.cached_property
    def training_rows(self) -> Mixture:
        """All training rows."""
        return self._open("train")

    @functools.cached_property
    def held_out_rows(self) -> Mixture:
        """All validation rows."""
        return self._open("validation")

    def _open(self, split: Split) -> Mixture:
        return mixture.open_mixture(
            self.config.data,
            self._datasets,
            self.tokenizer,
            split=split,
            vocab_size=self.task.target.arch.vocab_size,
        )

    def batches(
        self, rows: Mixture, *, batch_size: int | None = None, state: Any = None
    ) -> Batches:
        """Returns endless batches of this process's rows, from the position `state` on.

        Args:
          batch_size: Rows per batch, over all processes; None uses `train.batch_size`.
          state: Position to resume from; None is the beginning.
        Raises:
          InputError: The data do not fill a batch, or `state` belongs to other data.
        """
        size = batch_size or self.config.train.batch_size
        own_rows = steps_lib.rows_of_process(self.sharding, size)
        return Batches(rows, batch_size=size, mine=own_rows, state=state)

    def token_counts(self) -> np.ndarray:
        """Returns how often each token is a label in the run's batches, int64 [V].

        The result is equal on every process. Only the first `COUNTED_TOKENS` tokens are counted,
        which is enough to rank the vocabulary.
        """
        source = Batches(self.training_rows, batch_size=1)
        num_rows = self.steps() * self.config.train.batch_size
        rows = min(num_rows, self.training_rows.num_rows, COUNTED_TOKENS // self.config.data.length)
        counts = np.zeros(self.task.target.arch.vocab_size, np.int64)
        for row in itertools.islice(source, rows):
            counts += np.bincount(row["tokens"][row["loss_mask"] != 0], minlength=len(counts))
        return counts

    def steps(self) -> int:
        """Returns the total number of optimizer steps, enough to read `train.epochs` in full.

        Raises:
          InputError: The data do not fill a batch.
        """
        config = self.config.train
        if config.steps is not None:
            return config.steps
        self.batches(self.training_rows)  # Raises if the data do not fill a batch.
        # Take the decimal number that the user wrote: as floats, 1.1 × 100 rows exceed 110.
        rows = fractions.Fraction(repr(config.epochs)) * self.training_rows.num_rows
        return math.ceil(rows / config.batch_size)

    @functools.cached_property
    def held_out_prompts(self) -> dict[str, list[tuple[int, ...]]]:
        """Token ids of the prompts for measuring mean acceptance length (τ), by data set."""
        config = self.config.evaluation
        if config.prompts_file is not None:
            source = PromptsConfig(file=config.prompts_file, chat=None)
            vocab_size = self.task.target.arch.vocab_size
            held_out_prompts = prompts.read_prompts(
                source, self.tokenizer, vocab_size=vocab_size, stdin=None
            )
            name = pathlib.Path(config.prompts_file).stem
            return {name: [prompt.ids for prompt in held_out_prompts[: config.prompts]]}
        directory = store.data_directory(self.config.data.data_dir)
        return agreement.run_first_process_first(
            "held-out prompts",
            lambda: mixed_prompts(self._datasets, self.tokenizer, directory, limit=config.prompts),
        )

    def drafting_test(self, kind: Callable[..., DraftingTest]) -> DraftingTest | None:
        """Returns a test that measures τ on held-out prompts, or None if it is disabled.

        Args:
          kind: The class `offline.evaluation.DraftingTest`, which this package must not import.
        """
        if not self.config.evaluation.prompts or not self.task.drafts:
            return None
        return kind(
            self.task.target,
            self.task.working,
            self.config.evaluation_decode,
            self.held_out_prompts,
            stop_ids=self.task.target.arch.eos_token_id,
        )

    def plan(self) -> train_plan.TrainPlan:
        """Returns the plan of the run without reading any data."""
        steps = self.config.train.steps
        optimizer, _ = self.optimizer(steps or 1)
        return train_plan.make_plan(self.task, optimizer, steps=steps)


def prepare(config: TrainRun, *, date: datetime.date | None = None, dry: bool = False) -> TrainJob:
    """Builds and checks everything that a run needs, except its weights.

    Args:
      dry: Prepare a plan only: use no device and download nothing.
    """
    mesh = dataclasses.asdict(config.mesh)
    placed = shardings.make_sharding(mesh, config.sharding_rules, abstract=dry)
    task = tasks.make_task(config, placed, download=not dry)
    directory = task.target_source.directory
    if config.tokenizer is not None:
        directory = checkpoint.find(config.tokenizer, download=not dry)
    tokenizer = tokenizer_loading.for_target(directory, thinking=config.data.thinking, date=date)
    if not dry:
        agreement.check_same("tokenizer", tokenizer.fingerprint)
    job = TrainJob(config, placed, task, tokenizer, directory)
    _check(job)
    return job


def _check(job: TrainJob) -> None:
    arch, length = job.task.target.arch, job.config.data.length
    if job.tokenizer.vocab_size > arch.vocab_size:
        raise errors.ConfigError(
            f"tokenizer: {job.tokenizer_directory or 'plain bytes'}: has "
            f"{job.tokenizer.vocab_size} tokens, but the target's vocabulary has {arch.vocab_size}"
        )
    if length > arch.max_position_embeddings:
        raise errors.ConfigError(
            f"data.length: {length}, but the target was made for "
            f"{arch.max_position_embeddings} positions"
        )


def mixed_prompts(
    sets: Mapping[str, Dataset],
    tokenizer: Tokenizer,
    directory: pathlib.Path,
    split: Split = "validation",
    limit: int = 12,
) -> dict[str, list[tuple[int, ...]]]:
    """Returns prompts of data sets as token ids by data set, at most `limit` in total.

    Messages are encoded with the chat template of the tokenizer. Prompts that already are token
    ids, such as those of a decode run's outputs.jsonl, stay unchanged.

    Args:
      directory: Directory of all data sets; caches the prompts of large ones.
      limit: Maximum number of prompts over all data sets.
    Raises:
      InputError: A data set has no examples in this split, or the chat template cannot render its
        messages.
    """
    prompts = {}
    for place, (name, dataset) in enumerate(sets.items()):
        share = limit // len(sets) + (place < limit % len(sets))
        sample = _sample(dataset, split, share, directory) if share else []
        if share and not sample:
            raise dataset.empty(split)
        prompts[name] = [_encode(prompt, tokenizer) for prompt in sample]
    return prompts


def _encode(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if prompt.get("prompt_ids"):
        return tuple(prompt["prompt_ids"])
    try:
        return tuple(tokenizer.encode_chat(prompt["messages"], **prompt["variables"]))
    except errors.InputError as error:
        raise errors.InputError(f"{prompt['place']}: {error}") from error


def _sample(dataset: Dataset, split: Split, count: int, directory: pathlib.Path) -> list[Prompt]:
    """Returns up to `count` prompts from all over a split, always the same ones."""
    name = f"{dataset.name}-{dataset.variant}-{dataset.version}-{split}-{count}.json"
    path = directory / "prompts" / name
    if dataset.takes_long:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text(encoding="utf-8"))
    sample = [_as_prompt(example) for example in dataset.sample(split, count)]
    if dataset.takes_long:
        with contextlib.suppress(OSError):  # the directory may be read-only
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(path, json.dumps(sample))
    return sample


def _as_prompt(example: Example) -> Prompt:
    if example.prompt_ids:
        return {"prompt_ids": example.prompt_ids}
    place = example.place or f"data set {example.task}"
    return {"messages": example.prompt, "variables": example.variables, "place": place}
