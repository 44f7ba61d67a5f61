"""Published acceptance lengths and speed-ups, for forced acceptance and for comparison."""

import dataclasses
from collections.abc import Mapping

ORIGIN = (
    "Qwen3-4B with Qwen3-4B-DFlash-b16, greedy, on TPU v4 and v5p; one run per prompt, from the "
    "results published with tpu-spec-decode"
)


def _shares(*lines: str) -> tuple[float, ...]:
    return tuple(float(share) for line in lines for share in line.split())


# Fraction of cycles that committed 1 … 16 tokens, bonus included. The source rounds to four digits,
# so the fractions of a data set add up to 1 within 0.0001.
HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "aime24": _shares(
        "0.1083 0.1458 0.1189 0.1107 0.0668 0.0464 0.0521 0.0456",
        "0.0309 0.0236 0.0277 0.0285 0.0195 0.0212 0.0171 0.1368",
    ),
    "aime25": _shares(
        "0.1022 0.1271 0.1305 0.0905 0.0767 0.0642 0.0628 0.0428",
        "0.0283 0.0221 0.0297 0.0269 0.0186 0.0228 0.0166 0.1381",
    ),
    "alpaca": _shares(
        "0.3567 0.2509 0.1486 0.0713 0.0499 0.0285 0.0155 0.0131",
        "0.0059 0.0048 0.0048 0.0036 0.0024 0.0024 0.0036 0.0380",
    ),
    "gsm8k": _shares(
        "0.1107 0.1629 0.1270 0.1031 0.0858 0.0662 0.0478 0.0554",
        "0.0391 0.0347 0.0185 0.0250 0.0195 0.0163 0.0152 0.0727",
    ),
    "humaneval": _shares(
        "0.1173 0.1667 0.1111 0.0905 0.0905 0.0494 0.0514 0.0473",
        "0.0329 0.0247 0.0267 0.0247 0.0247 0.0103 0.0103 0.1214",
    ),
    "math500": _shares(
        "0.0744 0.1186 0.0965 0.0854 0.0704 0.0583 0.0603 0.0372",
        "0.0332 0.0402 0.0312 0.0231 0.0291 0.0342 0.0231 0.1849",
    ),
    "mbpp": _shares(
        "0.1381 0.1157 0.1045 0.1007 0.0858 0.0597 0.0597 0.0560",
        "0.0485 0.0373 0.0373 0.0299 0.0224 0.0336 0.0037 0.0672",
    ),
    "mt-bench": _shares(
        "0.1703 0.1864 0.1473 0.0794 0.0852 0.0644 0.0437 0.0357",
        "0.0230 0.0265 0.0219 0.0115 0.0127 0.0081 0.0069 0.0771",
    ),
    "swe-bench": _shares(
        "0.2644 0.2172 0.1896 0.1031 0.0566 0.0511 0.0330 0.0165",
        "0.0118 0.0087 0.0063 0.0087 0.0094 0.0079 0.0024 0.0134",
    ),
}

# For trees of so many drafts, built from a drafter's marginals: their τ relative to a chain's.
TREE_GAINS: Mapping[int, float] = {32: 1.22}
TREE_ORIGIN = "DDTree (arXiv 2604.12989) has about 22 % more at a budget of 32"


@dataclasses.dataclass(frozen=True)
class MeasuredTask:
    """Figures of a task that others measured, at batch 1.

    Attributes:
      plain_ms: Time per token of plain decoding.
      token_ms: Time per token with drafts.
    """

    tau: float
    speedup: float
    plain_ms: float
    token_ms: float

    @property
    def cycle_ms(self) -> float:
        """Returns the approximate time of a cycle; τ and `token_ms` are means over prompts."""
        return self.tau * self.token_ms


PORT_ORIGIN = (
    "measured by others, README of tpu-spec-decode: the same pair, block 16, greedy, batch 1, on",
    "one device of a v5p-8; the host drives the loop (benchmarks/standalone_dflash.py there)",
)
PORT: Mapping[str, MeasuredTask] = {
    "math500": MeasuredTask(8.80, 5.72, 8.02, 1.40),
    "aime24": MeasuredTask(6.48, 3.98, 7.69, 1.93),
    "aime25": MeasuredTask(6.14, 3.35, 6.85, 2.05),
    "gsm8k": MeasuredTask(5.40, 3.17, 7.32, 2.31),
    "humaneval": MeasuredTask(5.76, 3.53, 7.70, 2.18),
    "mbpp": MeasuredTask(6.16, 2.77, 7.31, 2.64),
    "mt-bench": MeasuredTask(3.87, 2.36, 7.20, 3.05),
    "alpaca": MeasuredTask(2.86, 1.65, 6.72, 4.08),
    "swe-bench": MeasuredTask(3.35, 1.60, 6.85, 4.27),
}


@dataclasses.dataclass(frozen=True)
class CycleTimes:
    """Milliseconds of a plain token and of a cycle."""

    plain_ms: float
    cycle_ms: float

    @property
    def ratio(self) -> float:
        """Returns the time of a cycle relative to a plain token."""
        return self.cycle_ms / self.plain_ms


def beside(
    heading: str, tokens: Mapping[str, float], roofline: CycleTimes, cycles: CycleTimes
) -> list[str]:
    """Returns a table that compares the expected speed-up with the measured figures in `PORT`.

    Args:
      tokens: Expected mean acceptance length (τ) by task.
      cycles: Expected times by the compiler's cycles; all zero if these are unknown.
    """
    tasks = [task for task in tokens if task in PORT]
    text = [
        f"expected ({heading}) beside measured elsewhere",
        f"  {'':<12}{'expected':>24}  {'at their τ':>15}{'measured':>10}",
        f"  {'':<12}{'τ':>6}{'roofline':>10}{'cycles':>8}  {'τ':>5}{'roofline':>10}{'':>10}",
    ]

    def row(name: str, tau: float, their_tau: float, measured: float) -> str:
        by_cycles = f"{tau / cycles.ratio:.2f}×" if cycles.plain_ms else "–"
        return (
            f"  {name:<12}{tau:>6.2f}{f'{tau / roofline.ratio:.2f}×':>10}{by_cycles:>8}"
            f"  {their_tau:>5.2f}{f'{their_tau / roofline.ratio:.2f}×':>10}{f'{measured:.2f}×':>10}"
        )

    def mean(values) -> float:
        return sum(values) / len(tasks)

    text += [row(task, tokens[task], PORT[task].tau, PORT[task].speedup) for task in tasks]
    taus = mean(tokens[task] for task in tasks), mean(PORT[task].tau for task in tasks)
    text.append(row("mean", *taus, mean(PORT[task].speedup for task in tasks)))
    plain, cycle = (mean(getattr(PORT[task], name) for task in tasks)
                    for name in ("plain_ms", "cycle_ms"))  # fmt: skip
    ratios = [PORT[task].tau / PORT[task].speedup for task in tasks]
    return [
        *text,
        f"  a plain token, ms: expected {_both('plain_ms', roofline, cycles)}; "
        f"measured {plain:.2f}",
        f"  a cycle, ms: expected {_both('cycle_ms', roofline, cycles)}; measured {cycle:.2f}",
        f"  a cycle over a plain token: expected {_both('ratio', roofline, cycles)}; measured "
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"  {PORT_ORIGIN[0]}",
        f"  {PORT_ORIGIN[1]}",
    ]


def _both(name: str, roofline: CycleTimes, cycles: CycleTimes) -> str:
    by_cycles = f", {getattr(cycles, name):.2f} by cycles" if cycles.plain_ms else ""
    return f"{getattr(roofline, name):.2f} by roofline{by_cycles}"
