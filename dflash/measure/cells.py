"""Figures of a benchmark, computed from samples on the host.

A cell is one strategy on one task. τ is the mean acceptance length; T_1 the time of a cycle of the
baseline, which commits one token; T_draft and T_verify the times of a cycle's two forwards; `rest`
is the remainder of the cycle. Then

    speed-up = τ · T_1 / cycle,   and without the rest:   ideal = τ · T_1 / (T_draft + T_verify).
"""

import dataclasses
import functools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dflash.config.schema import AUTO
from dflash.measure import roofline, warnings
from dflash.measure.bench import Bench
from dflash.measure.bootstrap import bootstrap
from dflash.measure.roofline import Machine
from dflash.measure.samples import Sample, TaskRound
from dflash.measure.warnings import Doubt


@dataclasses.dataclass(frozen=True)
class Cost:
    """Milliseconds of a cycle and of its parts, which add up to it.

    The parts are None if the block size is chosen anew for every cycle.

    Attributes:
      cycle: Wall-clock time of a cycle in the decode loop, host included.
      draft: T_draft, timed alone.
      verify: T_verify, timed alone.
      rest: Remainder: observing, committing, and host time between dispatches.
    """

    cycle: float
    draft: float | None
    verify: float | None
    rest: float | None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One strategy on one task, over all rounds; figures of cycles are None if none was run.

    Attributes:
      task, strategy: Names of the task and the strategy.
      rounds, prompts: Number of rounds, and of prompts; every turn of a conversation is a prompt.
      groups: Number of conversations, which the bootstrap resamples.
      busy_slots: Number of sequences in flight, averaged over the decode time.
      block_size: Rows per sequence that the target verifies.
      output_tokens, cycles: Totals over all rounds, without the first token of each prompt.
      tau: Mean acceptance length (τ).
      acceptance_histogram: Number of cycles by acceptance length.
      joint_acceptance: For each draft position, the fraction of cycles that accepted it.
      conditional_acceptance: The same fraction among cycles that accepted all positions before it.
      ttft_ms: Median time from a prompt's dispatch to its first token, over prompts and rounds.
      tpot_ms: Time of a prompt per token after the first.
      tokens_per_second: Throughput of all slots together.
      speedup: Tokens per second relative to the baseline.
      speedup_interval: Ends of the bootstrap interval; None with too few conversations.
      speedup_with_prefill: Speed-up with the time to first token added to both sides.
      identical_share: Fraction of outputs that equal the baseline's, token for token.
      checked: Number of outputs, over all rounds, whose prompt has a right answer.
      correct_share: Fraction of these outputs that have it; None without any.
      cost_ms: Cost of a cycle.
      baseline_cycle_ms: T_1.
      ideal_speedup: Ideal speed-up, as defined in the module's docstring.
      share_of_ideal: Speed-up relative to the ideal one.
      losses: Factors by which the speed-up is below τ: "verify" is T_verify / T_1, "draft" is
        (T_draft + T_verify) / T_verify, "rest" is a cycle over T_draft + T_verify.
      roofline_ms: Lower bound of T_verify by the roofline.
      doubts: Warnings about figures of the cell.
    """

    task: str
    strategy: str
    rounds: int
    prompts: int
    groups: int
    busy_slots: float | None
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
    roofline_ms: float | None = None
    doubts: tuple[Doubt, ...] = ()

    def doubtful(self, about: str) -> bool:
        """Returns whether there are warnings about these figures; see `warnings.Doubt.about`."""
        return warnings.concern(self.doubts, about)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Properties of a run that its figures are judged by.

    Attributes:
      baseline: Name of the strategy that the others are compared with.
      block_sizes: Rows per sequence that the target verifies, by strategy.
      longest_paths: Most tokens that a cycle may commit, by strategy.
      slots: Number of sequences decoded at once.
      forced: Acceptance lengths are forced, so outputs are meaningless and not compared.
      exact: Every output must equal the baseline's.
      least_ms: Maps a strategy and its context length in tokens to the roofline of a verification;
        None if the machine's peak rates are unknown.
      doubts: Warnings about the run as a whole.
    """

    baseline: str
    block_sizes: Mapping[str, int]
    longest_paths: Mapping[str, int]
    slots: int = 1
    forced: bool = False
    exact: bool = False
    least_ms: Callable[[str, int], float] | None = None
    doubts: tuple[Doubt, ...] = ()


def cells(rounds: Sequence[TaskRound], setting: Setting) -> list[Cell]:
    """Computes the cells of the completed rounds, which may come in any order, task by task."""
    found = []
    for task in dict.fromkeys(one.task for one in rounds):
        done = [one for one in rounds if one.task == task]
        by_strategy = {
            name: [sample for one in done for sample in one.samples if sample.strategy == name]
            for name in setting.block_sizes
        }
        plain = by_strategy[setting.baseline]
        found += [_cell(samples, plain, done, setting) for samples in by_strategy.values()]
    return found


def setting_of(
    bench: Bench, machine: Machine | None = None, about_run: tuple[Doubt, ...] = ()
) -> Setting:
    """Returns the properties of a benchmark that its figures are judged by.

    Args:
      bench: Prepared benchmark.
      machine: Peak rates for the roofline; None if unknown.
      about_run: Warnings about the run as a whole.
    """
    config = bench.config
    coupled = config.decode.verify == "coupled" or not config.decode.temperature

    def least_ms(machine: Machine, name: str, context: int) -> float:
        return roofline.target_work(
            bench.target,
            batch=config.decode.batch_size,
            rows=bench.block_sizes[name],
            context=context,
            kv_dtype=config.decode.kv_dtype,
        ).ideal_ms(machine)

    return Setting(
        baseline=bench.baseline,
        block_sizes=bench.block_sizes,
        longest_paths=bench.longest_paths,
        slots=config.decode.batch_size,
        forced=bench.workload.forced,
        exact=config.dtype == "float32" and coupled and config.decode.kv_dtype == AUTO,
        least_ms=machine and functools.partial(least_ms, machine),
        doubts=about_run,
    )


@dataclasses.dataclass(frozen=True)
class Average:
    """One strategy over all tasks, each with the same weight."""

    strategy: str
    tasks: int
    tau: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    identical_share: float | None
    correct_share: float | None
    share_of_ideal: float | None
    doubts: tuple[Doubt, ...] = ()

    def doubtful(self, about: str) -> bool:
        """Returns whether there are warnings about these figures; see `warnings.Doubt.about`."""
        return warnings.concern(self.doubts, about)


def averages(cells: Sequence[Cell], rounds: Sequence[TaskRound], *, baseline: str) -> list[Average]:
    """Averages the cells of each strategy over tasks."""

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
                doubts=tuple(dict.fromkeys(one for cell in own for one in cell.doubts)),
            )
        )
    return found


def _cell(
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    rounds: Sequence[TaskRound],
    setting: Setting,
) -> Cell:
    """Computes the cell of a strategy's samples on one task, compared with the baseline's."""
    name, longest_path = samples[0].strategy, setting.longest_paths[samples[0].strategy]
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
    cell = Cell(
        task=samples[0].task,
        strategy=name,
        rounds=len(rounds),
        prompts=len({one.id for one in completions}),
        groups=len({number for sample in samples for number in sample.conversations}),
        busy_slots=_ratio(sum(s.elapsed_ms for s in samples), sum(s.clock_ms for s in samples)),
        block_size=setting.block_sizes[name],
        output_tokens=sum(sample.tokens for sample in samples),
        cycles=len(lengths),
        tau=tau,
        acceptance_histogram={str(n): counts[n] for n in range(1, longest_path + 1)},
        joint_acceptance=joint,
        conditional_acceptance=conditional,
        ttft_ms=statistics.median(one.prefill_ms for one in completions),
        tpot_ms=_ratio(sum(s.elapsed_ms for s in samples), sum(s.tokens for s in samples)),
        tokens_per_second=None if speed is None else 1e3 * speed,
        speedup=speedup,
        speedup_interval=bootstrap([samples], [plain])[1] if speedup else None,
        speedup_with_prefill=_ratio(
            _tokens_per_ms(samples, prefill=True), _tokens_per_ms(plain, prefill=True)
        ),
        identical_share=None if setting.forced else identical_share(samples, plain),
        checked=len(marks),
        correct_share=_mean(marks),
        cost_ms=cost,
        baseline_cycle_ms=baseline_ms,
        ideal_speedup=ideal,
        share_of_ideal=_ratio(speedup, ideal),
        losses=_losses(cost, baseline_ms),
        roofline_ms=_roofline_ms(name, rounds, setting) if cost else None,
    )
    return dataclasses.replace(cell, doubts=_doubts(cell, setting))


def _doubts(cell: Cell, setting: Setting) -> tuple[Doubt, ...]:
    """Returns the warnings about figures of a cell."""
    found = setting.doubts
    if cell.speedup is not None:
        found += warnings.of_prompts(cell.groups)
        found += warnings.of_outputs(cell.identical_share, exact=setting.exact)
        found += warnings.of_slots(cell.busy_slots, setting.slots)
    if cell.cost_ms is not None and cell.cost_ms.verify is not None:
        cost = cell.cost_ms
        parts = cost.draft, cost.verify
        found += warnings.of_cost(cost.cycle, parts, share_of_ideal=cell.share_of_ideal)
        found += warnings.of_forward("verification", cost.verify, cell.roofline_ms)
    return found


def _roofline_ms(name: str, rounds: Sequence[TaskRound], setting: Setting) -> float | None:
    contexts = [one.parts[name].context_tokens for one in rounds if name in one.parts]
    if setting.least_ms is None or not contexts:
        return None
    return setting.least_ms(name, round(statistics.median(contexts)))


def position_acceptance(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], longest_path: int
) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Computes joint and conditional acceptance of draft positions 1 … G.

    The last cycle of each sequence is left out, since a limit or a stop token may have cut it
    short. A cycle gives no information about positions beyond its block, so the joint fraction is
    the product of the conditional ones (Kaplan & Meier 1958). If all blocks have the same size, it
    is the plain fraction of cycles.

    Args:
      sequences: For each sequence, its cycles' acceptance lengths (bonus included) and row counts.
      longest_path: G + 1.
    Returns:
      For each position, the fraction of cycles that accepted it; and the fraction among cycles that
      accepted all positions before it, None if there are no such cycles.
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
    """Returns the fraction of outputs, over all rounds, that equal the baseline's."""
    expected = {one.id: one.output_ids for sample in plain for one in sample.completions}
    equal = [one.output_ids == expected[one.id] for sample in samples for one in sample.completions]
    return statistics.fmean(equal)


def _tokens_per_ms(samples: Sequence[Sample], *, prefill: bool = False) -> float | None:
    """Returns tokens per millisecond; with `prefill`, first tokens and their prefills count too."""
    tokens = sum(sample.tokens for sample in samples)
    clock = sum(sample.clock_ms for sample in samples)
    if prefill:
        completions = [one for sample in samples for one in sample.completions]
        tokens += len(completions)
        clock += sum(one.prefill_ms for one in completions)
    return _ratio(tokens, clock)


def _cycle_ms(samples: Sequence[Sample]) -> float | None:
    """Returns the mean time of a cycle as one sequence experiences it."""
    return _ratio(sum(s.elapsed_ms for s in samples), sum(s.cycles for s in samples))


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
    """Returns part / whole; None if either is zero or unknown."""
    return part / whole if part and whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else None
