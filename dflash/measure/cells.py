"""From samples to figures: plain arithmetic on the host, the same for every device.

A cell is one strategy on one task. Symbols: τ is the tokens per cycle; T_1 the time of a cycle of
the baseline, which is a plain token; T_draft and T_verify the times of a cycle's two forwards; rest
what is left of the cycle. Then

    speed-up = τ · T_1 / cycle,   and were there no rest:   ideal = τ · T_1 / (T_draft + T_verify).
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dflash.measure.bench import Bench, Sample, TaskRound

DRAWS = 2000  # of the bootstrap
INTERVAL_PERCENT = 95.0
# A bootstrap interval reaches from the least group to the largest at most, and n groups all lie on
# one side of their true median with probability 2^(1-n): from 6 on less often than 5 %.
MIN_GROUPS = 6
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Cost:
    """Milliseconds of a cycle; the first is the sum of the others.

    Where the block size is chosen anew for every cycle, only the mean cycle is known.

    Attributes:
      cycle: in the real loop, on the wall clock, host included.
      draft: T_draft, timed alone.
      verify: T_verify, timed alone.
      rest: the difference: observing, committing, and the host between dispatches.
    """

    cycle: float
    draft: float | None
    verify: float | None
    rest: float | None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One strategy on one task, over all rounds; None where no cycle was run.

    Attributes:
      task, strategy: names.
      rounds, prompts: how many of each; every turn of a conversation is a prompt.
      groups: of conversations that were decoded together; the bootstrap draws these.
      block_size: rows that the target verifies.
      output_tokens, cycles: of all rounds; tokens without each prompt's first.
      tau: mean acceptance length.
      acceptance_histogram: cycles by acceptance length.
      joint_acceptance: for each draft position, the share of cycles that accepted it.
      conditional_acceptance: the same share among cycles that accepted all positions before it.
      ttft_ms: median over prompts and rounds, from the prompt's dispatch to its first token.
      tpot_ms: time per token after the first, of a prompt.
      tokens_per_second: of all slots together.
      speedup: tokens per second over those of the baseline.
      speedup_interval: the two ends of its bootstrap interval; None with under `MIN_GROUPS` groups.
      speedup_with_prefill: the same with every prompt's time to first token in both clocks.
      identical_share: of prompts whose output is that of the baseline, token for token.
      checked: outputs of all rounds whose prompt has a right answer.
      correct_share: share of these with the right answer; None without any.
      cost_ms: of a cycle.
      baseline_cycle_ms: T_1.
      ideal_speedup: see above.
      share_of_ideal: speedup over that.
      losses: factors by which the speed-up is below τ: "verify" T_verify over T_1,
        "draft" (T_draft + T_verify) over T_verify, "rest" a cycle over T_draft + T_verify.
    """

    task: str
    strategy: str
    rounds: int
    prompts: int
    groups: int
    block_size: int
    output_tokens: int
    cycles: int
    tau: float | None
    acceptance_histogram: Mapping[str, int]
    joint_acceptance: tuple[float, ...]
    conditional_acceptance: tuple[float | None, ...]
    ttft_ms: float
    tpot_ms: float | None
    tokens_per_second: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    speedup_with_prefill: float | None
    identical_share: float | None
    checked: int
    correct_share: float | None
    cost_ms: Cost | None
    baseline_cycle_ms: float | None
    ideal_speedup: float | None
    share_of_ideal: float | None
    losses: Mapping[str, float]


def cells(
    rounds: Sequence[TaskRound],
    *,
    baseline: str,
    block_sizes: Mapping[str, int],
    longest_paths: Mapping[str, int],
    forced: bool,
) -> list[Cell]:
    """All cells of the rounds that are done, task by task.

    Args:
      rounds: in any order.
      baseline: name of the strategy that the others are compared with.
      block_sizes: rows that the target verifies, by strategy.
      longest_paths: what a cycle may commit at most, by strategy.
      forced: acceptance lengths were given, so outputs are meaningless and not compared.
    """
    found = []
    for task in dict.fromkeys(one.task for one in rounds):
        done = [one for one in rounds if one.task == task]
        by_strategy = {
            name: [sample for one in done for sample in one.samples if sample.strategy == name]
            for name in block_sizes
        }
        for name, block_size in block_sizes.items():
            cell = _cell(
                by_strategy[name],
                by_strategy[baseline],
                done,
                longest_path=longest_paths[name],
                block_size=block_size,
                forced=forced,
            )
            found.append(cell)
    return found


def of_bench(bench: Bench, rounds: Sequence[TaskRound]) -> list[Cell]:
    """All cells of the rounds that a benchmark has done; see `cells`."""
    return cells(
        rounds,
        baseline=bench.baseline,
        block_sizes=bench.block_sizes,
        longest_paths=bench.longest_paths,
        forced=bench.workload.forced,
    )


@dataclasses.dataclass(frozen=True)
class Average:
    """One strategy over all tasks, each task counting alike."""

    strategy: str
    tasks: int
    tau: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    identical_share: float | None
    correct_share: float | None
    share_of_ideal: float | None


def averages(cells: Sequence[Cell], rounds: Sequence[TaskRound], *, baseline: str) -> list[Average]:
    """The mean of each strategy's cells."""

    def samples(task, strategy):
        every = (sample for one in rounds for sample in one.samples)
        return [one for one in every if (one.task, one.strategy) == (task, strategy)]

    found = []
    for name in dict.fromkeys(cell.strategy for cell in cells):
        own = [cell for cell in cells if cell.strategy == name]
        timed = [cell.task for cell in own if cell.speedup is not None]
        pairs = [[samples(task, who) for task in timed] for who in (name, baseline)]
        average, interval = bootstrap(*pairs) if timed else (None, None)
        found.append(
            Average(
                strategy=name,
                tasks=len(own),
                tau=_mean(cell.tau for cell in own),
                speedup=average,
                speedup_interval=interval,
                identical_share=_mean(cell.identical_share for cell in own),
                correct_share=_mean(cell.correct_share for cell in own),
                share_of_ideal=_mean(cell.share_of_ideal for cell in own),
            )
        )
    return found


def _cell(
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    rounds: Sequence[TaskRound],
    *,
    longest_path: int,
    block_size: int,
    forced: bool,
) -> Cell:
    """The cell of a strategy's samples of one task, beside those of the baseline."""
    name = samples[0].strategy
    completions = [one for sample in samples for one in sample.completions]
    lengths = [length for one in completions for length in one.acceptance_lengths]
    counts = Counter(lengths)
    marks = [mark for sample in samples for mark in sample.marks if mark is not None]
    joint, conditional = position_acceptance(
        [(one.acceptance_lengths, one.block_sizes) for one in completions], longest_path
    )
    speed = _tokens_per_ms(samples)
    cost, baseline_ms = _cost(samples, rounds, name), _cycle_ms(plain)
    speedup = _ratio(speed, _tokens_per_ms(plain))
    tau = statistics.fmean(lengths) if lengths else None
    two = cost.draft + cost.verify if cost and cost.verify else None
    ideal = tau * baseline_ms / two if two and baseline_ms else None
    return Cell(
        task=samples[0].task,
        strategy=name,
        rounds=len(rounds),
        prompts=len({one.id for one in completions}),
        groups=len({sample.group for sample in samples}),
        block_size=block_size,
        output_tokens=sum(sample.tokens for sample in samples),
        cycles=len(lengths),
        tau=tau,
        acceptance_histogram={str(n): counts[n] for n in range(1, longest_path + 1)},
        joint_acceptance=joint,
        conditional_acceptance=conditional,
        ttft_ms=statistics.median(one.prefill_ms for one in completions),
        tpot_ms=_ratio(sum(s.token_ms for s in samples), sum(s.tokens for s in samples)),
        tokens_per_second=None if speed is None else 1e3 * speed,
        speedup=speedup,
        speedup_interval=bootstrap([samples], [plain])[1] if speedup else None,
        speedup_with_prefill=_ratio(
            _tokens_per_ms(samples, prefill=True), _tokens_per_ms(plain, prefill=True)
        ),
        identical_share=None if forced else identical_share(samples, plain),
        checked=len(marks),
        correct_share=_mean(marks),
        cost_ms=cost,
        baseline_cycle_ms=baseline_ms,
        ideal_speedup=ideal,
        share_of_ideal=_ratio(speedup, ideal),
        losses=_losses(cost, baseline_ms),
    )


def position_acceptance(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], longest_path: int
) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Joint and conditional acceptance of draft positions 1 … G.

    The last cycle of each sequence is left out, for a limit or a stop token may have cut it short.
    A cycle says nothing about positions past its block; so the joint share is the product of the
    conditional ones (Kaplan & Meier 1958), a plain share where all blocks have the same size.

    Args:
      sequences: for each its cycles' acceptance lengths, bonus included, and rows verified.
      longest_path: G + 1.
    Returns:
      For each position the share of cycles that accepted it; and that share among the cycles that
      accepted all positions before it, None where there are none.
    """
    cycles = [pair for one in sequences for pair in list(zip(*one, strict=True))[:-1]]
    lengths, rows = np.array(cycles, int).reshape(-1, 2).T
    conditional = []
    for position in range(1, longest_path):
        tried = int(np.count_nonzero((lengths >= position) & (rows > position)))
        kept = int(np.count_nonzero((lengths > position) & (rows > position)))
        conditional.append(kept / tried if tried else None)
    joint = np.cumprod([share or 0.0 for share in conditional])
    return tuple(joint.tolist()), tuple(conditional)


def identical_share(samples: Sequence[Sample], plain: Sequence[Sample]) -> float:
    """Share of the outputs of all rounds that equal the baseline's."""
    expected = {one.id: one.output_ids for sample in plain for one in sample.completions}
    equal = [one.output_ids == expected[one.id] for sample in samples for one in sample.completions]
    return statistics.fmean(equal)


def bootstrap(
    samples: Sequence[Sequence[Sample]], plain: Sequence[Sequence[Sample]]
) -> tuple[float, tuple[float, float] | None]:
    """The mean speed-up over tasks, and its bootstrap interval.

    Groups of conversations are drawn with replacement within each task, and for each a round of its
    own; strategy and baseline keep the same draws, as they ran side by side.

    Args:
      samples: of the strategy, by task.
      plain: of the baseline, by task.
    Returns:
      The mean; the two ends of its interval, None where a task has fewer than `MIN_GROUPS` groups.
    """
    tables = [
        np.concatenate([_table(ours), _table(theirs)])
        for ours, theirs in zip(samples, plain, strict=True)
    ]
    speedup = float(np.mean([_speedup(table.sum(axis=(1, 2))) for table in tables]))
    if min(table.shape[1] for table in tables) < MIN_GROUPS:
        return speedup, None
    random = np.random.default_rng(_SEED)
    drawn = []
    for table in tables:
        _, groups, rounds = table.shape
        some_groups = random.integers(0, groups, (DRAWS, groups))
        some_rounds = random.integers(0, rounds, (DRAWS, groups))
        drawn.append(_speedup(table[:, some_groups, some_rounds].sum(axis=-1)))
    tail = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(np.mean(drawn, axis=0), [tail, 100 - tail])
    return speedup, (float(low), float(high))


def _table(samples: Sequence[Sample]) -> np.ndarray:
    """Wall milliseconds and tokens, [2, groups, rounds]."""
    groups = sorted({sample.group for sample in samples})
    rounds = sorted({sample.round for sample in samples})
    table = np.zeros((2, len(groups), len(rounds)))
    for sample in samples:
        place = groups.index(sample.group), rounds.index(sample.round)
        table[:, *place] += max(sample.wall_ms, 1e-9), sample.tokens
    return table


def _speedup(sums: np.ndarray) -> np.ndarray:
    """Tokens per time over the baseline's, [...] from the sums [4, ...] of two tables."""
    wall_ms, tokens, plain_ms, plain_tokens = sums
    return tokens / wall_ms * plain_ms / np.maximum(plain_tokens, 1)


def _tokens_per_ms(samples: Sequence[Sample], *, prefill: bool = False) -> float | None:
    """Tokens over wall time; with `prefill`, first tokens and the time to them count too."""
    tokens = sum(sample.tokens for sample in samples)
    wall = sum(sample.wall_ms for sample in samples)
    if prefill:
        completions = [one for sample in samples for one in sample.completions]
        tokens += len(completions)
        wall += sum(one.prefill_ms for one in completions)
    return _ratio(tokens, wall)


def _cycle_ms(samples: Sequence[Sample]) -> float | None:
    return _ratio(sum(s.wall_ms for s in samples), sum(s.cycles for s in samples))


def _cost(samples: Sequence[Sample], rounds: Sequence[TaskRound], name: str) -> Cost | None:
    cycle = _cycle_ms(samples)
    if cycle is None:
        return None
    if any(name not in one.parts for one in rounds):
        return Cost(cycle, None, None, None)
    draft = statistics.median(one.parts[name].draft_ms for one in rounds)
    verify = statistics.median(one.parts[name].verify_ms for one in rounds)
    return Cost(cycle, draft, verify, cycle - draft - verify)


def _losses(cost: Cost | None, baseline_ms: float | None) -> dict[str, float]:
    if cost is None or not cost.verify or not baseline_ms:
        return {}
    return {
        "verify": cost.verify / baseline_ms,
        "draft": (cost.draft + cost.verify) / cost.verify,
        "rest": cost.cycle / (cost.draft + cost.verify),
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; None where one of them is zero or unknown."""
    return part / whole if part and whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else None
