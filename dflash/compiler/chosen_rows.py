"""Expected throughput of strategies that choose the rows of each cycle, by simulating the choice.

The decode loop's own code chooses, divides and learns; see `block_choice`. A cycle of each choice
takes the compiler's time. Acceptance lengths are drawn from the histogram of each sequence's task,
or are those of a recording, cycle by cycle, with the drafter's confidence if that is recorded. A
cycle that verifies fewer rows than it could accept commits the tokens of these rows, and the next
cycle is drawn or recorded as if it had verified all. The time in which a drafter observes the rows
of plain cycles later is not counted.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash.compiler.compile_points import PointSpec
from dflash.compiler.forecast import PLAIN, Forecast
from dflash.inference.cycle import block_choice, divided_rows
from dflash.inference.cycle.block_choice import BlockChoice
from dflash.inference.cycle.choices import Division
from dflash.measure import plots
from dflash.measure.acceptance import ExpectedAcceptance, Histograms, Recordings
from dflash.measure.workload import MIX

NEW_TOKENS = 512  # Length of each output, after which its slot gets another sequence.
_CYCLES = 1500
_FIRST = _CYCLES // 4  # The first cycles, in which the pool is still empty, do not count.


@dataclasses.dataclass(frozen=True)
class Choices:
    """Choices of rows of a strategy at one batch size, and the points with their costs.

    Attributes:
      sizes: Block sizes, ascending.
      division: Cycles that divide their rows among sequences.
      points: Names of the points, block sizes first, then divisions.
    """

    sizes: tuple[int, ...]
    division: Division
    points: tuple[str, ...]


class Cycles(NamedTuple):
    """Acceptance of the largest block in each cycle of a simulation, for B sequences at once.

    Attributes:
      lengths: int32 [C, B]; tokens that a cycle commits if all rows are verified.
      confidence: float32 [C, B, G]; the drafter's confidence in its drafts, or None.
    """

    lengths: jax.Array
    confidence: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Expected throughput of a batch of sequences of one task, or of a mix of all.

    Attributes:
      batch: Number of sequences.
      context: Tokens of each sequence before the block.
      task: Name of the task, or `MIX`.
      plain: Tokens per second of plain decoding, by roofline.
      fixed: Name and tokens per second of the best fixed block size.
      division: Name and tokens per second of the best division, if every cycle divides so; None if
        none fits in memory.
      whole: Tokens per second if one block size is chosen for the whole batch; None unless every
        choice fits in memory.
      divided: Tokens per second if rows may be divided among the sequences too; None unless every
        choice fits in memory.
    """

    batch: int
    context: int
    task: str
    plain: float
    fixed: tuple[str, float]
    division: tuple[str, float] | None
    whole: float | None
    divided: float | None


def choices_of(specs: Sequence[PointSpec]) -> dict[str, dict[int, Choices]]:
    """Returns the choices of each strategy with `block_size: auto`, by its name and batch size."""
    found: dict[str, dict[int, Choices]] = {}
    key = operator.attrgetter("strategy", "batch")
    for (strategy, batch), some in itertools.groupby(specs, key):
        points = [spec for spec in some if spec.choice]
        if points:
            sizes = tuple(int(spec.choice) for spec in points if not spec.divides)
            names = tuple(spec.name for spec in points)
            found.setdefault(strategy, {})[batch] = Choices(sizes, points[0].division, names)
    return found


def throughputs(
    forecast: Forecast,
    choices: Mapping[int, Choices],
    acceptance: ExpectedAcceptance,
    contexts: Sequence[int],
) -> list[Throughput]:
    """Returns the throughput at each batch size and context, on each task and on their mix.

    Args:
      forecast: Costs of all choices.
      choices: Choices of the strategy by batch size.
      acceptance: Acceptance of the largest block.
      contexts: Tokens of each sequence before the block.
    """
    found = []
    for batch, context in itertools.product(sorted(choices), contexts):
        if not forecast.fits(PLAIN, batch, context):
            continue
        for task in (*acceptance.histograms, MIX):
            cycles = _cycles(acceptance, choices[batch], batch, task)
            found.append(_throughput(forecast, choices[batch], cycles, batch, context, task))
    return found


def _cycles(acceptance, choices, batch, task) -> Cycles:
    """Returns the cycles of a task, or of the mix of all: recorded ones if there are any."""
    largest = choices.sizes[-1]
    recorded = acceptance.recordings
    source = recorded or acceptance.histograms
    some = source if task == MIX else {task: source[task]}
    if not recorded:
        return drawn(some, batch, largest)
    cycles = played(some, batch, largest)
    return cycles if choices.division.by_confidence else cycles._replace(confidence=None)


def drawn(histograms: Histograms, batch: int, largest: int, seed: int = 0) -> Cycles:
    """Returns independent cycles of sequences that take the tasks in turns.

    Args:
      histograms: Number or fraction of cycles that committed 1, 2, … tokens, by task.
      batch: Number of sequences.
      largest: Largest block size.
      seed: Seed of the draws.
    """
    by_task = np.zeros((len(histograms), largest))
    for row, shares in zip(by_task, histograms.values(), strict=True):
        lengths = np.minimum(np.arange(len(shares)), largest - 1)
        np.add.at(row, lengths, np.asarray(shares) / np.sum(shares))
    cumulative = jnp.asarray(np.cumsum(by_task, axis=1))[np.arange(batch) % len(by_task)]

    def of_cycle(number):
        key = jax.random.fold_in(jax.random.key(seed), number)
        uniform = jax.random.uniform(key, (batch, 1))
        return 1 + jnp.sum(uniform >= cumulative, axis=1).clip(max=largest - 1)

    return Cycles(jax.vmap(of_cycle)(jnp.arange(_CYCLES)))


def played(recordings: Recordings, batch: int, largest: int) -> Cycles:
    """Returns the recorded cycles, in order, of sequences that take the tasks in turns.

    The cycles of all prompts of a task follow one another, over and over. The sequences of a task
    begin at places that are evenly spaced among them.

    Args:
      recordings: Recordings of each task, with confidence in as many drafts each, or without.
      batch: Number of sequences.
      largest: Largest block size.
    """
    lengths, confidence = [], []
    for i in range(batch):
        prompts = list(recordings.values())[i % len(recordings)]
        own = np.concatenate([prompt.lengths for prompt in prompts])
        of_task = len(range(i % len(recordings), batch, len(recordings)))
        begin = (i // len(recordings)) * len(own) // of_task
        places = (begin + np.arange(_CYCLES)) % len(own)
        lengths.append(np.minimum(own, largest)[places])
        if all(prompt.confidence is not None for prompt in prompts):
            stated = np.concatenate([prompt.confidence for prompt in prompts])
            confidence.append(stated[places, : largest - 1])
    if len({rows.shape[1] for rows in confidence}) != 1 or len(confidence) < batch:
        return Cycles(jnp.array(lengths, jnp.int32).T)
    return Cycles(jnp.array(lengths, jnp.int32).T, jnp.array(confidence).swapaxes(0, 1))


def _throughput(forecast, choices, cycles, batch, context, task) -> Throughput:
    sizes, names = choices.sizes, choices.points
    fits = [forecast.fits(name, batch, context) for name in names]
    times = np.array([_cycle_ms(forecast, name, batch, context) for name in names])
    plain = 1e3 * batch / _cycle_ms(forecast, PLAIN, batch, context)

    def per_second(allowed: Iterable[int]) -> float:
        """Returns the tokens per second if only these choices are allowed."""
        some = np.full(len(names), np.inf)
        some[list(allowed)] = times[list(allowed)]
        return 1e3 * simulate(some, sizes, choices.division, cycles)

    each = {i: per_second([i]) for i in range(1, len(names)) if fits[i]}
    fixed = {names[i]: speed for i, speed in each.items() if i < len(sizes)} | {PLAIN: plain}
    divisions = {names[i]: speed for i, speed in each.items() if i >= len(sizes)}
    best = max(fixed, key=fixed.get)
    division = max(divisions.items(), key=operator.itemgetter(1), default=None)
    whole = divided = None
    if all(fits):
        whole, divided = per_second(range(len(sizes))), per_second(range(len(names)))
    fixed = best, fixed[best]
    return Throughput(batch, context, task, plain, fixed, division, whole, divided)


def _cycle_ms(forecast: Forecast, name: str, batch: int, context: int) -> float:
    return forecast.points[name, batch].cost(context).roofline_ms


def simulate(
    times: Sequence[float],
    sizes: tuple[int, ...],
    division: Division,
    cycles: Cycles,
) -> float:
    """Returns the tokens per unit of time of a batch with these cycles.

    Args:
      times: Time of a cycle of each block size, then of each division.
      sizes: Block sizes, ascending.
      division: Divisions of rows.
      cycles: Acceptance in each cycle. Rows are divided by confidence if there is any.
    """
    batch = cycles.lengths.shape[1]
    by_confidence = cycles.confidence is not None
    division = dataclasses.replace(division, by_confidence=by_confidence)
    state = block_choice.new(batch, sizes, jnp.asarray(times, jnp.float32), division)
    state = block_choice.carried(state)
    tokens, spent = _run(state, cycles, sizes=sizes, division=division)
    return float(tokens / spent)


@functools.partial(jax.jit, static_argnames=("sizes", "division"))
def _run(state: BlockChoice, cycles: Cycles, *, sizes, division) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens that the counted cycles commit, and their time.

    Args:
      state: Statistics at the start, with the times of cycles.
      cycles: Acceptance in each cycle.
      sizes: Block sizes, ascending.
      division: Divisions of rows.
    """
    batch = cycles.lengths.shape[1]
    active = jnp.ones(batch, bool)

    def verify(size, state, cycle, left):
        committed = jnp.minimum(jnp.minimum(cycle.lengths, size), left)
        return block_choice.learn(state, committed, left, sizes, division), committed

    def verify_divided(mean_rows, state, cycle, left):
        rates = block_choice.rates(state) if cycle.confidence is None else cycle.confidence
        rates = rates[:, : division.drafted(sizes, mean_rows) - 1]
        chances = block_choice.survival(rates, active, left)
        rows = divided_rows.divide(chances, active, mean_rows, division.num_replicas)
        committed = jnp.minimum(jnp.minimum(cycle.lengths, rows), left)
        confidence = None if cycle.confidence is None else rates
        how = sizes, division, rows, None, confidence
        return block_choice.learn(state, committed, left, *how), committed

    choices = [
        *(functools.partial(verify, size) for size in sizes),
        *(functools.partial(verify_divided, mean_rows) for mean_rows in division.mean_rows),
    ]

    def step(carry, inputs):
        (state, left, tokens, spent), (number, cycle) = carry, inputs
        state = block_choice.choose(state, active, left, sizes, division)
        time = state.seconds[state.index]
        state, committed = jax.lax.switch(state.index, choices, state, cycle, left)
        left = left - committed
        ended = left <= 0
        state = dataclasses.replace(
            state,
            tried=jnp.where(ended[:, None], 0, state.tried),
            accepted=jnp.where(ended[:, None], 0, state.accepted),
        )
        counts = number >= _FIRST
        tokens += jnp.where(counts, committed.sum(), 0)
        spent += jnp.where(counts, time, 0)
        return (state, jnp.where(ended, NEW_TOKENS, left), tokens, spent), None

    # Outputs that began together would end together.
    left = 1 + (jnp.arange(batch) * NEW_TOKENS) // batch
    carry = state, left, jnp.int32(0), jnp.float32(0)
    (_, _, tokens, spent), _ = jax.lax.scan(step, carry, (jnp.arange(_CYCLES), cycles))
    return tokens, spent


def lines(found: Sequence[Throughput], strategy: str) -> list[str]:
    """Formats throughputs as lines of text; empty without any."""
    if not found:
        return []
    text = [
        "",
        f"expected tokens per second of {strategy}, by roofline: plain decoding, the best fixed "
        "choice,",
        "and, relative to that, one block size chosen for the whole batch, rows divided too, and "
        "the best",
        "division in every cycle",
        f"  {'batch':>5} {'context':>8}  {'task':<12}{'plain':>9}{'fixed':>9}  {'':<12}"
        f"{'whole':>7}{'divided':>9}{'always':>8}",
    ]
    for one in found:
        name, fixed = one.fixed
        always, speed = one.division or ("", None)
        whole, divided, all_cycles = (
            "–" if value is None else f"{value / fixed:.2f}×"
            for value in (one.whole, one.divided, speed)
        )
        text.append(
            f"  {one.batch:>5} {one.context:>8,}  {one.task:<12}{one.plain:>9,.0f}{fixed:>9,.0f}"
            f"  {name:<12}{whole:>7}{divided:>9}{all_cycles:>8} {always}".rstrip()
        )
    return text


def plot(found: Sequence[Throughput], context: int, note: str) -> bytes:
    """Plots the speed-ups on a mix of all tasks over the batch size, as a PNG file."""
    own = [one for one in found if one.task == MIX and one.context == context and one.divided]
    batches = [one.batch for one in own]
    curves = {
        "best fixed block size": [one.fixed[1] / one.plain for one in own],
        "one size chosen per cycle": [one.whole / one.plain for one in own],
        "rows divided among sequences": [one.divided / one.plain for one in own],
    }
    return plots.curves(
        [plots.Line(name, batches, values) for name, values in curves.items()],
        title=f"Expected speed-up, mix of all tasks, after {context:,} tokens",
        x="batch",
        y="speed-up over plain decoding",
        even=1.0,
        log="x",
        note=note,
    )
