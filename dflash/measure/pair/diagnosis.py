"""Measurement of a pair of target and drafter, and of other readings of the drafter's fields."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
from flax import nnx

from dflash.drafters.base import Drafter
from dflash.inference import replay
from dflash.inference.engine import Engine
from dflash.inference.replay import Text
from dflash.inference.request import RequestOutput
from dflash.loading import job as jobs
from dflash.loading.job import Job
from dflash.measure.pair import alternatives
from dflash.measure.pair.alternatives import Alternative
from dflash.offline.decoding import decode
from dflash.text import tokenizer_loading

# Prompts of a config that names at most one: short questions of many kinds.
PROMPTS = (
    "What is 17 times 24? Show each step.",
    "A train travels 180 km in 2.5 hours. What is its average speed?",
    "Solve for x: 3x + 7 = 2x - 5.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Explain what a hash table is and when you would use one.",
    "Summarize the causes of the French Revolution in three sentences.",
    "Describe how rain forms, for a child of ten.",
    "List five countries in South America with their capitals.",
    "Translate into French: The library opens at nine in the morning.",
    "Write a short, polite email that asks to move a meeting to Friday.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for pancakes.",
    "Write a haiku about the sea.",
    "Convert this list to JSON: apples 3, pears 5, plums 2.",
    "Why is the sky blue?",
)
MAX_PROMPTS = len(PROMPTS)
MAX_TOKENS = 64  # Per prompt.
# An alternative is suspicious if it accepts this many times the drafts, and so many tokens more.
_CLEARLY, _AT_LEAST = 1.25, 0.1


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Tokens that cycles committed.

    Attributes:
      cycles: Number of cycles by tokens committed, the bonus token included.
    """

    cycles: Counter[int]

    @property
    def tau(self) -> float:
        """Mean acceptance length (τ); 1 if there was no cycle."""
        total = self.cycles.total()
        return sum(n * count for n, count in self.cycles.items()) / total if total else 1.0

    def survival(self, positions: int) -> list[float]:
        """Returns the share of cycles that accepted the draft at positions 1, 2, …."""
        total = max(1, self.cycles.total())
        return [
            sum(count for n, count in self.cycles.items() if n > position) / total
            for position in range(1, positions + 1)
        ]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Acceptance of a drafter as its files describe it, and the texts of all prompts, in order."""

    acceptance: Acceptance
    texts: tuple[Text, ...]


@dataclasses.dataclass(frozen=True)
class Reading:
    """Acceptance under one alternative."""

    alternative: Alternative
    acceptance: Acceptance


def prepare(job: Job) -> Job:
    """Returns the job as it is examined: greedy chains, at most 16 prompts of 64 tokens, at once.

    Args:
      job: Job without prompts, whose config names some or none.
    Raises:
      UserError: The drafter is a strategy without drafts, or the prompts cannot be read.
    """
    config = job.config
    decoding = dataclasses.replace(
        config.decode,
        temperature=0.0,
        max_new_tokens=min(MAX_TOKENS, config.decode.max_new_tokens),
        max_length=None,  # The prompts' own.
        num_pages=None,
    )
    prompts = config.prompts
    if len(prompts.text) <= 1 and prompts.file is None and prompts.dataset is None:
        prompts = dataclasses.replace(prompts, text=PROMPTS, chat=None)
    drafter = config.drafter.as_chain()
    config = dataclasses.replace(config, decode=decoding, prompts=prompts, drafter=drafter)
    job = _with_prompts(job.with_drafter(config))
    # Slots for all prompts at once, a multiple of the config's slots.
    slots = config.decode.batch_size
    batch = -(-len(job.prompts) // slots) * slots
    decoding = dataclasses.replace(decoding, batch_size=batch)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, decode=decoding))


def alternatives_of(job: Job) -> list[Alternative]:
    """Returns the other readings of a job's fields."""
    shape, source = getattr(job.drafter, "shape", None), job.drafter_source.hf or {}
    if shape is None:
        return []  # A strategy without weights fits any target and any prompt.
    readings = alternatives.of_drafter(
        shape,
        job.target.arch,
        job.tokenizer,
        window=source.get("sliding_window"),
        longest_prompt=max((len(prompt.ids) for prompt in job.prompts), default=0),
    )
    return [*readings, *alternatives.of_prompts(job.config.prompts, job.tokenizer)]


def measure(engine: Engine, job: Job) -> Decoded:
    """Decodes a job's prompts."""
    events = decode(engine, job.requests(job.prompts))
    done = {event.id: event for event in events if isinstance(event, RequestOutput)}
    lengths = (done[prompt.index].acceptance_lengths for prompt in job.prompts)
    texts = tuple(Text(prompt.ids, done[prompt.index].output_ids) for prompt in job.prompts)
    return Decoded(Acceptance(Counter(itertools.chain(*lengths))), texts)


def with_prompts(job: Job, alternative: Alternative) -> Job:
    """Returns the job with the prompts of another reading."""
    prompts = dataclasses.replace(job.config.prompts, **alternative.prompts)
    words = tokenizer_loading.for_target(
        job.target_source.directory, thinking=prompts.thinking, date=job.date
    )
    config = dataclasses.replace(job.config, prompts=prompts)
    return _with_prompts(dataclasses.replace(job, config=config, tokenizer=words))


def read_all(
    engine: Engine,
    job: Job,
    decoded: Decoded,
    choices: Sequence[Alternative],
    tell: Callable[[Reading], None] = lambda reading: None,
) -> list[Reading]:
    """Measures a job under each alternative, and calls `tell` with each reading.

    Another reading of the drafter is measured on the texts that are decoded already. Other prompts
    are decoded.
    """
    shapes = [choice.shape for choice in choices if choice.shape is not None]
    layers = {layer for shape in shapes for layer in getattr(shape, "target_layer_ids", None) or ()}
    texts = None
    readings = []
    for alternative in choices:
        if alternative.shape is None:
            acceptance = measure(engine, with_prompts(job, alternative)).acceptance
        else:
            texts = texts or replay.compute(
                job.target, decoded.texts, [*layers, *job.drafter.feature_layers]
            )
            drafter = read_as(job.drafter, alternative)
            acceptance = Acceptance(replay.cycles(drafter, job.target, texts).counts)
        readings.append(Reading(alternative, acceptance))
        tell(readings[-1])
    return readings


def compiled_engine(
    job: Job, choices: Sequence[Alternative], progress: Callable[[int, int], None]
) -> Engine:
    """Returns an engine for a job's prompts, and for those of its alternatives."""
    more = (
        with_prompts(job, alternative).prompts
        for alternative in choices
        if alternative.shape is None
    )
    prompts = [*job.prompts, *itertools.chain(*more)]
    engine = job.engine(prompts)
    lengths = [len(prompt.ids) for prompt in prompts]
    engine.compile(lengths, progress, greedy=engine.is_greedy)
    engine.time_cycles()
    return engine


def read_as(drafter: Drafter, alternative: Alternative) -> Drafter:
    """Returns the drafter with another shape, and the same weights."""
    graph, weights = nnx.split(drafter)
    # Variables of its own, which hold the same arrays.
    other = nnx.merge(graph, jax.tree.map(lambda array: array, weights))
    other.shape = shape = alternative.shape
    if hasattr(shape, "target_layer_ids"):
        other.feature_layers = shape.target_layer_ids or ()
    return other


def suspicious(acceptance: Acceptance, readings: Sequence[Reading]) -> Reading | None:
    """Returns the reading that accepts most, if it accepts clearly more than the file's own."""
    best = max(readings, key=lambda reading: reading.acceptance.tau, default=None)
    if best is None:
        return None
    gain, drafts = best.acceptance.tau - acceptance.tau, best.acceptance.tau - 1
    clear = gain >= _AT_LEAST and drafts >= _CLEARLY * (acceptance.tau - 1)
    return best if clear else None


def _with_prompts(job: Job) -> Job:
    prompts = jobs.read_prompts(job, job.config.prompts, stdin=None)
    return jobs.with_prompts(job, prompts[:MAX_PROMPTS])
