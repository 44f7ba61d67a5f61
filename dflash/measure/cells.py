"""Figures of a benchmark, computed from samples on the host.

A cell is one strategy on one task. τ is the mean acceptance length; T_1 the time of a cycle of the
baseline, which commits one token; T_draft and T_verify the times of a cycle's two forwards; `rest`
is the remainder of the cycle. Then

    speed-up = τ · T_1 / cycle,   and without the rest:   ideal = τ · T_1 / (T_draft + T_verify).
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from dflash.config.schema import AUTO
from dflash.measure import roofline, warnings
from dflash.measure.bench import Bench
from dflash.measure.roofline import Machine
from dflash.measure.samples import (
    Sample,
    TaskRound,
    bootstrap,
    cycle_ms,
    identical_share,
    position_acceptance,
    ratio,
    tokens_per_ms,
)
from dflash.measure.warnings import FigureWarning


@dataclasses.dataclass(frozen=True)
class CycleCost:
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
      rounds, prompts: Number of rounds, and of prompts; every turn of a conversation is a prompt.
      groups: Number of conversations, which the bootstrap resamples.
      busy_slots: Number of sequences in flight, averaged over the decode time.
      output_tokens, cycles: Totals over all rounds, without the first token of each prompt.
      joint_acceptance: For each draft position, the fraction of cycles that accepted it.
      conditional_acceptance: The same fraction among cycles that accepted all positions before it.
      ttft_ms: Median time from a prompt's dispatch to its first token, over prompts and rounds.
      tpot_ms: Time of a prompt per token after the first.
      speedup: Tokens per second relative to the baseline.
      speedup_interval: Ends of the bootstrap interval; None with too few conversations.
      identical_share: Fraction of outputs that equal the baseline's, token for token.
      checked: Number of outputs, over all rounds, whose prompt has a right answer.
      correct_share: Fraction of these outputs that have it; None without any.
      losses: Factors by which the speed-up is below τ: "verify" is T_verify / T_1, "draft" is
        (T_draft + T_verify) / T_verify, "rest" is a cycle over T_draft + T_verify.
      roofline_ms: Lower bound of T_verify by the roofline.
    """

    task: str
    strategy: str
    temperature: float
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
    identical_share: float | None
    checked: int
    correct_share: float | None
    cost_ms: CycleCost | None
    baseline_cycle_ms: float | None
    ideal_speedup: float | None
    share_of_ideal: float | None
    losses: Mapping[str, float]
    roofline_ms: float | None = None
    warnings: tuple[FigureWarning, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """Properties of a run that determine how its figures are judged.

    Attributes:
      block_sizes: Rows per sequence that the target verifies, by strategy.
      longest_paths: Most tokens that a cycle may commit, by strategy.
      temperatures: Temperature by task; 0 for tasks that it lacks.
      forced: Whether acceptance lengths are forced, so outputs are meaningless and not compared.
      exact: Whether every output must equal the baseline's.
      least_ms: Maps a strategy and its context length in tokens to the roofline of a verification;
        None if the machine's peak rates are unknown.
    """

    baseline: str
    block_sizes: Mapping[str, int]
    longest_paths: Mapping[str, int]
    temperatures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slots: int = 1
    forced: bool = False
    exact: bool = False
    least_ms: Callable[[str, int], float] | None = None
    warnings: tuple[FigureWarning, ...] = ()


def cells(rounds: Sequence[TaskRound], setting: Setting) -> list[Cell]:
    """Computes the cells of the completed rounds, which may come in any order, task by task."""
    all_cells = []
    for task in dict.fromkeys(round_.task for round_ in rounds):
        done = [round_ for round_ in rounds if round_.task == task]
        by_strategy = {
            name: [
                sample for round_ in done for sample in round_.samples if sample.strategy == name
            ]
            for name in setting.block_sizes
        }
        plain = by_strategy[setting.baseline]
        all_cells += [_cell(samples, plain, done, setting) for samples in by_strategy.values()]
    return all_cells


def setting_of(
    bench: Bench, machine: Machine, about_run: tuple[FigureWarning, ...] = ()
) -> Setting:
    """Returns the properties of a benchmark that determine how its figures are judged."""
    config = bench.config
    tasks = bench.workload.tasks
    temperatures = {task: bench.temperature(items[0]) for task, items in tasks.items()}
    # On a CPU, the kernels give a row the same bits whatever stands beside it.
    sharding = bench.target.sharding
    on_one_cpu = sharding.platform == "cpu" and sharding.mesh.size == 1
    full_precision = config.dtype == "float32" and config.decode.kv_dtype == AUTO
    coupled = config.decode.verify == "coupled" or not any(temperatures.values())

    def least_ms(name: str, context: int) -> float:
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
        temperatures=temperatures,
        slots=config.decode.batch_size,
        forced=bench.workload.forced,
        exact=coupled and (on_one_cpu or full_precision),
        least_ms=least_ms,
        warnings=about_run,
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
    warnings: tuple[FigureWarning, ...] = ()


def averages(cells: Sequence[Cell], rounds: Sequence[TaskRound], *, baseline: str) -> list[Average]:
    """Averages the cells of each strategy over tasks."""

    def samples(task, strategy):
        all_samples = (sample for round_ in rounds for sample in round_.samples)
        return [
            round_ for round_ in all_samples if (round_.task, round_.strategy) == (task, strategy)
        ]

    means = []
    for name in dict.fromkeys(cell.strategy for cell in cells):
        of_strategy = [cell for cell in cells if cell.strategy == name]
        timed = [cell.task for cell in of_strategy if cell.speedup is not None]
        pairs = [[samples(task, who) for task in timed] for who in (name, baseline)]
        average, interval = bootstrap(*pairs) if timed else (None, None)
        means.append(
            Average(
                strategy=name,
                tasks=len(of_strategy),
                tau=_mean(cell.tau for cell in of_strategy),
                speedup=average,
                speedup_interval=interval,
                identical_share=_mean(cell.identical_share for cell in of_strategy),
                correct_share=_mean(cell.correct_share for cell in of_strategy),
                share_of_ideal=_mean(cell.share_of_ideal for cell in of_strategy),
                warnings=tuple(
                    dict.fromkeys(warning for cell in of_strategy for warning in cell.warnings)
                ),
            )
        )
    return means


def _cell(
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    rounds: Sequence[TaskRound],
    setting: Setting,
) -> Cell:
    name, longest_path = samples[0].strategy, setting.longest_paths[samples[0].strategy]
    completions = [completion for sample in samples for completion in sample.completions]
    lengths = [length for completion in completions for length in completion.acceptance_lengths]
    counts = Counter(lengths)
    marks = [mark for sample in samples for mark in sample.marks if mark is not None]
    joint, conditional = position_acceptance(
        [(completion.acceptance_lengths, completion.block_sizes) for completion in completions],
        longest_path,
    )
    speed = tokens_per_ms(samples)
    cost, baseline_ms = _cost(samples, rounds, name), cycle_ms(plain)
    speedup = ratio(speed, tokens_per_ms(plain))
    tau = statistics.fmean(lengths) if lengths else None
    two = cost.draft + cost.verify if cost and cost.verify else None
    ideal = tau * baseline_ms / two if two and baseline_ms else None
    cell = Cell(
        task=samples[0].task,
        strategy=name,
        temperature=setting.temperatures.get(samples[0].task, 0.0),
        rounds=len(rounds),
        prompts=len({completion.id for completion in completions}),
        groups=len({number for sample in samples for number in sample.conversations}),
        busy_slots=ratio(sum(s.elapsed_ms for s in samples), sum(s.clock_ms for s in samples)),
        block_size=setting.block_sizes[name],
        output_tokens=sum(sample.tokens for sample in samples),
        cycles=len(lengths),
        tau=tau,
        acceptance_histogram={str(n): counts[n] for n in range(1, longest_path + 1)},
        joint_acceptance=joint,
        conditional_acceptance=conditional,
        ttft_ms=statistics.median(completion.prefill_ms for completion in completions),
        tpot_ms=ratio(sum(s.elapsed_ms for s in samples), sum(s.tokens for s in samples)),
        tokens_per_second=None if speed is None else 1e3 * speed,
        speedup=speedup,
        speedup_interval=bootstrap([samples], [plain])[1] if speedup else None,
        identical_share=None if setting.forced else identical_share(samples, plain),
        checked=len(marks),
        correct_share=_mean(marks),
        cost_ms=cost,
        baseline_cycle_ms=baseline_ms,
        ideal_speedup=ideal,
        share_of_ideal=ratio(speedup, ideal),
        losses=_losses(cost, baseline_ms),
        roofline_ms=_roofline_ms(name, rounds, setting) if cost else None,
    )
    return dataclasses.replace(cell, warnings=_warnings(cell, setting))


def _warnings(cell: Cell, setting: Setting) -> tuple[FigureWarning, ...]:
    all_warnings = setting.warnings
    if cell.speedup is not None:
        all_warnings += warnings.of_prompts(cell.groups)
        all_warnings += warnings.of_outputs(cell.identical_share, exact=setting.exact)
        all_warnings += warnings.of_slots(cell.busy_slots, setting.slots)
    if cell.cost_ms is not None and cell.cost_ms.verify is not None:
        cost = cell.cost_ms
        parts = cost.draft, cost.verify
        all_warnings += warnings.of_cost(cost.cycle, parts, share_of_ideal=cell.share_of_ideal)
        all_warnings += warnings.of_forward("verification", cost.verify, cell.roofline_ms)
    return all_warnings


def _roofline_ms(name: str, rounds: Sequence[TaskRound], setting: Setting) -> float | None:
    contexts = [round_.parts[name].context_tokens for round_ in rounds if name in round_.parts]
    if setting.least_ms is None or not contexts:
        return None
    return setting.least_ms(name, round(statistics.median(contexts)))


def _cost(samples: Sequence[Sample], rounds: Sequence[TaskRound], name: str) -> CycleCost | None:
    cycle = cycle_ms(samples)
    if cycle is None:
        return None
    if any(name not in round_.parts for round_ in rounds):
        return CycleCost(cycle, None, None, None)
    draft = statistics.median(round_.parts[name].draft_ms for round_ in rounds)
    verify = statistics.median(round_.parts[name].verify_ms for round_ in rounds)
    return CycleCost(cycle, draft, verify, cycle - draft - verify)


def _losses(cost: CycleCost | None, baseline_ms: float | None) -> dict[str, float]:
    if cost is None or not cost.verify or not baseline_ms:
        return {}
    return {
        "verify": cost.verify / baseline_ms,
        "draft": (cost.draft + cost.verify) / cost.verify,
        "rest": cost.cycle / (cost.draft + cost.verify),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else None
