"""Prompts of a benchmark: from real tasks, or random ones with forced acceptance lengths."""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash import errors
from dflash.config import registry
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.schema import named_tasks, task_prompts
from dflash.loading import job as jobs
from dflash.measure import published
from dflash.storage import paths
from dflash.text import jsonl
from dflash.text.prompts import Prompt

DRAWN_PROMPT_TOKENS = 128  # Default length of a random prompt.
_SEED = 0
MIX = "mix"  # Name of the task that `Workload.with_mix` adds.
# Valid names of tasks, which appear in keys and file names.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Item:
    """One prompt of a task.

    Attributes:
      prompt: Prompt, numbered over all tasks.
      lengths: Acceptance lengths to force, one per cycle; None measures them.
      grader: Maps a text to whether it has the right answer, None if undecided. None if the prompt
        has no right answer, such as all but the last turn of a conversation.
      temperature: Temperature of the item's task; None for the config's.
      turn: Number of the turn in its conversation, from 0; turns of a conversation are neighbors.
      category: Category of the question, if its data set has categories.
    """

    prompt: Prompt
    max_new_tokens: int
    lengths: tuple[int, ...] | None = None
    grader: jobs.Grader | None = None
    temperature: float | None = None
    turn: int = 0
    category: str = ""
    question: str = ""

    @property
    def conversation(self) -> int:
        """Returns the number of the item's conversation: the index of its first turn."""
        return self.prompt.index - self.turn


@dataclasses.dataclass(frozen=True)
class Workload:
    """All tasks of a run."""

    tasks: Mapping[str, tuple[Item, ...]]

    @property
    def forced(self) -> bool:
        """Returns whether acceptance lengths are forced."""
        return any(item.lengths is not None for items in self.tasks.values() for item in items)

    @property
    def has_later_turns(self) -> bool:
        """Returns whether some turns are no items yet, because they need earlier answers."""
        return any(item.prompt.later_turns for item in self.items)

    @property
    def items(self) -> tuple[Item, ...]:
        """Returns the items of all tasks."""
        return tuple(item for items in self.tasks.values() for item in items)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Returns the prompts of all items, each once, in order of their index."""
        return tuple({item.prompt.index: item.prompt for item in self.items}.values())

    def with_turns(self, turns: Sequence[Prompt]) -> "Workload":
        """Returns the workload with an item for each turn of its conversations."""
        by_index = {prompt.index: prompt for prompt in turns}

        def turn_item(item: Item, index: int) -> Item:
            return dataclasses.replace(
                item,
                prompt=by_index[index],
                grader=item.grader if index == item.prompt.indices[-1] else None,
                turn=item.turn + index - item.prompt.index,
            )

        tasks = {
            task: tuple(turn_item(item, index) for item in items for index in item.prompt.indices)
            for task, items in self.tasks.items()
        }
        return dataclasses.replace(self, tasks=tasks)

    def with_mix(self) -> "Workload":
        """Returns the workload with one more task, `MIX`: prompts of all the others in turns.

        It has as many conversations as the largest task. With a single task nothing is added.
        """
        if len(self.tasks) == 1:
            return self
        alternating = itertools.chain.from_iterable(itertools.zip_longest(*self.tasks.values()))
        most = max(map(len, self.tasks.values()))
        mix = tuple(itertools.islice(filter(None, alternating), most))
        return dataclasses.replace(self, tasks={**self.tasks, MIX: mix})

    def queues(self, task: str, slots: int) -> list[tuple[Item, ...]]:
        """Returns the task's prompts as queues, which are decoded one after the other.

        With one slot each prompt is a queue of its own, so that strategies take turns prompt by
        prompt. With several, all prompts form one queue, so that no slot waits while there are
        prompts left.
        """
        items = self.tasks[task]
        return [(item,) for item in items] if slots == 1 else [tuple(items)]


def read(config: BenchmarkRun, job: jobs.Job) -> Workload:
    """Reads, or draws, the prompts of a run; raises InputError if a file is unusable."""
    if config.trace is not None:
        tasks = _made_up(config, read_trace(config.trace, config.trace_tasks), job)
    elif config.acceptance:
        tasks = _made_up(config, _draw(config, job), job)
    else:
        tasks = _at_temperatures(_tasks(config, job), config.temperatures)
    return Workload(tasks)


def acceptance_source(config: BenchmarkRun) -> dict[str, Any]:
    """Returns the source of the acceptance lengths, as in results.json."""
    if config.trace is not None:
        return {"source": "trace", "file": config.trace, "words": _TRACE_WORDS}
    if config.acceptance:
        return {
            "source": "published",
            "tasks": list(config.acceptance),
            "origin": published.ORIGIN,
            "words": _DRAWN_WORDS,
        }
    return {"source": "measured", "words": _MEASURED_WORDS}


def forced_note(config: BenchmarkRun) -> str:
    """Returns a note for plots of forced acceptance lengths; else an empty string."""
    return "acceptance lengths are forced, not measured" if config.forced else ""


_MEASURED_WORDS = "acceptance lengths are measured"
_TRACE_WORDS = (
    "acceptance lengths are forced: they were recorded elsewhere; drafting and verification are "
    "computed in full, the output is meaningless"
)
_DRAWN_WORDS = (
    "acceptance lengths are forced: each is drawn independently from published shares; drafting "
    "and verification are computed in full, the output is meaningless"
)


@dataclasses.dataclass(frozen=True)
class Recording:
    """Recorded acceptance of one prompt.

    Attributes:
      where: Description of the prompt's place.
      lengths: Tokens committed in each of C cycles, bonus included.
    """

    where: str
    prompt_tokens: int
    lengths: tuple[int, ...]


def read_trace(file: str, tasks: Sequence[str] = ()) -> dict[str, list[Recording]]:
    """Reads recorded acceptance lengths from a JSON list with one object per prompt.

    Each object has `acceptance_lengths` (tokens committed in each cycle, bonus included) and may
    have `dataset` and `prompt_tokens`.

    Args:
      tasks: Data sets to keep; empty keeps all.
    Raises:
      InputError: The file cannot be read, is not such a list, or lacks a task.
    """
    try:
        rows = json.loads(paths.to_path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.InputError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise errors.InputError(f"{file}: not JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise errors.InputError(f"{file}: expected a list of prompts, one object each")
    recordings: dict[str, list[Recording]] = {}
    for number, row in enumerate(rows):
        where = f"{file}: prompt {number}"
        try:
            task, recording = _recording(row, where)
        except errors.InputError as error:
            raise errors.InputError(f"{where}: {error}") from error
        recordings.setdefault(task, []).append(recording)
    for task in tasks:
        if task not in recordings:
            raise errors.InputError(
                f"trace_tasks: {file} has no {task!r}{registry.suggest(task, recordings)}"
            )
    return {task: recordings[task] for task in tasks or recordings}


def _recording(row: Any, where: str) -> tuple[str, Recording]:
    if not isinstance(row, dict) or "acceptance_lengths" not in row:
        raise errors.InputError("expected an object with acceptance_lengths")
    task = row.get("dataset", "trace")
    if not isinstance(task, str) or not _NAME.fullmatch(task):
        quoted = jsonl.quote(task)
        raise errors.InputError(f"dataset: expected letters, digits and any of _.-, not {quoted}")
    lengths = jsonl.check_ids(row["acceptance_lengths"], "acceptance_lengths")
    (size,) = jsonl.check_ids([row.get("prompt_tokens", DRAWN_PROMPT_TOKENS)], "prompt_tokens")
    for name, value in (("acceptance_lengths", min(lengths)), ("prompt_tokens", size)):
        if value < 1:
            raise errors.InputError(f"{name}: expected at least 1, got {value}")
    return task, Recording(where, size, lengths)


def check_lengths(workload: Workload, block_sizes: Mapping[str, int]) -> None:
    """Raises InputError if a forced length exceeds what some strategy's block can commit."""
    for task, items in workload.tasks.items():
        for item in items:
            longest = max(item.lengths or (1,))
            for strategy, block_size in block_sizes.items():
                if longest > block_size:
                    raise errors.InputError(
                        f"{item.prompt.source} ({task}): commits {longest} tokens in a cycle, but "
                        f"strategy {strategy!r} has a block of {block_size}; use a larger "
                        "block or another recording"
                    )


def _tasks(config: BenchmarkRun, job: jobs.Job) -> dict[str, tuple[Item, ...]]:
    tasks: dict[str, tuple[Item, ...]] = {}
    begin = 0
    for name, task in named_tasks(config.tasks).items():
        source = task_prompts(task, config.prompts_per_task)
        source = dataclasses.replace(source, raw_dir=config.raw_dir)
        prompts = jobs.read_prompts(job, source, stdin=sys.stdin)
        examples = jobs.find_examples(source) or [None] * len(prompts)
        graders = jobs.find_graders(source, examples) or [None] * len(prompts)
        tasks[name] = tuple(
            Item(
                dataclasses.replace(prompt, index=begin + prompt.index),
                config.decode.max_new_tokens,
                grader=grader,
                category=example.category if example else "",
                question=example.question if example else "",
            )
            for prompt, grader, example in zip(prompts, graders, examples, strict=True)
        )
        begin += prompts[-1].indices.stop
    return tasks


def _at_temperatures(
    tasks: Mapping[str, tuple[Item, ...]], temperatures: Sequence[float]
) -> dict[str, tuple[Item, ...]]:
    """Returns every task at every temperature, such as math@0.7; unchanged without any."""
    if not temperatures:
        return dict(tasks)
    return {
        f"{task}@{temperature:g}": tuple(
            dataclasses.replace(item, temperature=temperature) for item in items
        )
        for task, items in tasks.items()
        for temperature in temperatures
    }


def _draw(config: BenchmarkRun, job: jobs.Job) -> dict[str, list[Recording]]:
    random = np.random.default_rng(_SEED)
    drawn: dict[str, list[Recording]] = {}
    for task in config.acceptance:
        if task not in published.HISTOGRAMS:
            near = registry.suggest(task, published.HISTOGRAMS)
            raise errors.InputError(f"acceptance: nothing published on {task!r}{near}")
        _check_size(config, Recording(f"acceptance={task}", DRAWN_PROMPT_TOKENS, ()), job)
        shares = np.array(published.HISTOGRAMS[task])
        prompts = []
        for number in range(config.prompts_per_task):
            cycles = random.choice(
                len(shares), size=config.decode.max_new_tokens, p=shares / shares.sum()
            )
            where = f"acceptance={task}: prompt {number}"
            lengths = tuple(int(length) for length in 1 + cycles)
            prompts.append(Recording(where, DRAWN_PROMPT_TOKENS, lengths))
        drawn[task] = prompts
    return drawn


def _made_up(
    config: BenchmarkRun, recorded: Mapping[str, Sequence[Recording]], job: jobs.Job
) -> dict[str, tuple[Item, ...]]:
    random = np.random.default_rng(_SEED)
    vocab_size = job.target.arch.vocab_size
    tasks: dict[str, tuple[Item, ...]] = {}
    index = 0
    for task, recordings in recorded.items():
        items = []
        for recording in recordings[: config.prompts_per_task]:
            size = _check_size(config, recording, job)
            ids = tuple(random.integers(0, vocab_size, size).tolist())
            limit = min(config.decode.max_new_tokens, 1 + sum(recording.lengths))
            prompt = Prompt(index, ids, source=recording.where)
            items.append(Item(prompt, limit, recording.lengths))
            index += 1
        tasks[task] = tuple(items)
    return tasks


def _check_size(config: BenchmarkRun, recording: Recording, job: jobs.Job) -> int:
    """Returns the number of tokens of a random prompt; raises InputError if it does not fit."""
    size = config.prompt_tokens or recording.prompt_tokens
    job.check_length(Prompt(0, range(min(size, sys.maxsize)), source=recording.where))
    return size
