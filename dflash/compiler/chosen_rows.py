"""Expected throughput of strategies that choose the rows of each cycle, by simulating the choice.

The decode loop's own code chooses and learns; see `block_choice`. A cycle of each choice takes the
compiler's time, and acceptance lengths are drawn from the histogram of each sequence's task. The
time in which a drafter observes the rows of plain cycles later is not counted.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash.compiler.compile_points import PointSpec
from dflash.compiler.forecast import PLAIN, Forecast
from dflash.inference.cycle import block_choice
from dflash.inference.cycle.block_choice import BlockChoice, Division
from dflash.inference.cycle.rules import DIVIDED
from dflash.measure import plots
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


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Expected throughput of a batch of sequences of one task, or of a mix of all.

    Attributes:
      batch: Number of sequences.
      context: Tokens of each sequence before the block.
      task: Name of the task, or `MIX`.
      plain: Tokens per second of plain decoding, by roofline.
      fixed: Name and tokens per second of the best fixed block size.
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
    whole: float | None
    divided: float | None


def choices_of(specs: Sequence[PointSpec], num_replicas: int) -> dict[str, dict[int, Choices]]:
    """Returns the choices of each strategy with `block_size: auto`, by its name and batch size."""
    found: dict[str, dict[int, Choices]] = {}
    key = operator.attrgetter("strategy", "batch")
    for (strategy, batch), some in itertools.groupby(specs, key):
        points = [spec for spec in some if spec.choice]
        if points:
            sizes = tuple(int(spec.choice) for spec in points if not spec.divides)
            means = tuple(int(spec.choice.removeprefix(DIVIDED)) for spec in points if spec.divides)
            names = tuple(spec.name for spec in points)
            found.setdefault(strategy, {})[batch] = Choices(
                sizes, Division(means, num_replicas), names
            )
    return found


def throughputs(
    forecast: Forecast,
    choices: Mapping[int, Choices],
    histograms: Mapping[str, Sequence[float]],
    contexts: Sequence[int],
) -> list[Throughput]:
    """Returns the throughput at each batch size and context, on each task and on their mix.

    Args:
      forecast: Costs of all choices.
      choices: Choices of the strategy by batch size.
      histograms: Number or fraction of cycles that committed 1, 2, … tokens, by task.
      contexts: Tokens of each sequence before the block.
    """
    found = []
    for batch, context in itertools.product(sorted(choices), contexts):
        if not forecast.fits(PLAIN, batch, context):
            continue
        for task in (*histograms, MIX):
            some = histograms if task == MIX else {task: histograms[task]}
            found.append(_throughput(forecast, choices[batch], some, batch, context, task))
    return found


def _throughput(forecast, choices, histograms, batch, context, task) -> Throughput:
    sizes, names = choices.sizes, choices.points
    fits = [forecast.fits(name, batch, context) for name in names]
    times = np.array([_cycle_ms(forecast, name, batch, context) for name in names])
    plain = 1e3 * batch / _cycle_ms(forecast, PLAIN, batch, context)

    def per_second(allowed: Iterable[int]) -> float:
        """Returns the tokens per second if only these choices are allowed."""
        some = np.full(len(names), np.inf)
        some[list(allowed)] = times[list(allowed)]
        return 1e3 * simulate(some, sizes, choices.division, histograms, batch)

    fixed = {names[i]: per_second([i]) for i in range(1, len(sizes)) if fits[i]} | {PLAIN: plain}
    best = max(fixed, key=fixed.get)
    whole = divided = None
    if all(fits):
        whole, divided = per_second(range(len(sizes))), per_second(range(len(names)))
    return Throughput(batch, context, task, plain, (best, fixed[best]), whole, divided)


def _cycle_ms(forecast: Forecast, name: str, batch: int, context: int) -> float:
    return forecast.points[name, batch].cost(context).roofline_ms


def simulate(
    times: Sequence[float],
    sizes: tuple[int, ...],
    division: Division,
    histograms: Mapping[str, Sequence[float]],
    batch: int,
    seed: int = 0,
) -> float:
    """Returns the tokens per unit of time of a batch whose sequences take the tasks in turns.

    Args:
      times: Time of a cycle of each block size, then of each division.
      sizes: Block sizes, ascending.
      division: Divisions of rows.
      histograms: Number or fraction of cycles that committed 1, 2, … tokens, by task.
      batch: Number of sequences.
      seed: Seed of the acceptance lengths.
    """
    by_task = np.zeros((len(histograms), sizes[-1]))
    for row, shares in zip(by_task, histograms.values(), strict=True):
        lengths = np.minimum(np.arange(len(shares)), sizes[-1] - 1)
        np.add.at(row, lengths, np.asarray(shares) / np.sum(shares))
    cumulative = jnp.asarray(np.cumsum(by_task, axis=1))[np.arange(batch) % len(by_task)]
    per_sequence, pool = jnp.zeros((batch, sizes[-1] - 1)), jnp.zeros(sizes[-1] - 1)
    state = BlockChoice(
        tried=per_sequence,
        accepted=per_sequence,
        pool_tried=pool,
        pool_accepted=pool,
        seconds=jnp.asarray(times, jnp.float32),
        credit=jnp.float32(0),
        best=jnp.int32(0),
        promise=jnp.float32(0),
        index=jnp.int32(0),
    )
    tokens, spent = _run(state, cumulative, jax.random.key(seed), sizes=sizes, division=division)
    return float(tokens / spent)


@functools.partial(jax.jit, static_argnames=("sizes", "division"))
def _run(state: BlockChoice, cumulative, key, *, sizes, division) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens that the counted cycles commit, and their time.

    Args:
      state: Statistics at the start, with the times of cycles.
      cumulative: float32 [B, R]; chance that a cycle of the largest block commits at most n tokens.
      key: Key of the acceptance lengths.
      sizes: Block sizes, ascending.
      division: Divisions of rows.
    """
    batch = cumulative.shape[0]
    active = jnp.ones(batch, bool)

    def rows_of(state, left):
        chance = block_choice.survival(block_choice.rates(state), active, left)
        replicas = division.num_replicas
        divided = [
            block_choice.divide(
                chance[:, : block_choice.largest_share(sizes, mean) - 1], active, mean, replicas
            )
            for mean in division.mean_rows
        ]
        same = [jnp.full(batch, size, jnp.int32) for size in sizes]
        return jnp.stack([*same, *divided])[state.index]

    def step(carry, number):
        state, left, tokens, spent = carry
        state = block_choice.choose(state, active, left, sizes, division)
        rows = rows_of(state, left)
        drawn = jax.random.uniform(jax.random.fold_in(key, number), (batch, 1))
        lengths = 1 + jnp.sum(drawn >= cumulative, axis=1).clip(max=cumulative.shape[1] - 1)
        committed = jnp.minimum(jnp.minimum(lengths, rows), left)
        time = state.seconds[state.index]
        learned = [
            block_choice.learn(state, committed, left, sizes, division, verified)
            for verified in (None, rows)  # As in the decode loop: None unless rows are divided.
        ]
        state = jax.tree.map(functools.partial(jnp.where, state.index < len(sizes)), *learned)
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
    (_, _, tokens, spent), _ = jax.lax.scan(step, carry, jnp.arange(_CYCLES))
    return tokens, spent


def lines(found: Sequence[Throughput], strategy: str) -> list[str]:
    """Formats throughputs as lines of text; empty without any."""
    if not found:
        return []
    text = [
        "",
        f"expected tokens per second of {strategy}, by roofline: plain decoding, the best fixed "
        "choice,",
        "and, relative to that, one block size chosen for the whole batch, and rows divided too",
        f"  {'batch':>5} {'context':>8}  {'task':<12}{'plain':>9}{'fixed':>9}  {'':<12}"
        f"{'whole':>7}{'divided':>9}",
    ]
    for one in found:
        name, fixed = one.fixed
        whole, divided = (
            "–" if value is None else f"{value / fixed:.2f}×" for value in (one.whole, one.divided)
        )
        text.append(
            f"  {one.batch:>5} {one.context:>8,}  {one.task:<12}{one.plain:>9,.0f}{fixed:>9,.0f}"
            f"  {name:<12}{whole:>7}{divided:>9}"
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
