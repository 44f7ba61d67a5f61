"""Expected speed-ups: the compiler's costs of a cycle, joined with acceptance that is known.

Plain arithmetic. Of a strategy with B sequences and a context of c tokens,

    speed-up = τ · T_plain(B, c) / T_cycle(B, c),

where τ is the tokens that a cycle commits of a sequence, and both times are of the same B and c.
Nothing here was measured on a chip, and the host is left out: its loop runs on the device.
"""

import dataclasses
from collections.abc import Iterable, Mapping

# What limits an operation by the roofline: reading weights, reading the output head and writing its
# logits, reading the context, arithmetic, and reading or writing anything else.
WEIGHTS, HEAD, CONTEXT, ARITHMETIC, REST = LIMITS = (
    "weights", "output head", "context", "arithmetic", "rest",
)  # fmt: skip
PLAIN = "plain"  # the name of decoding without drafts


@dataclasses.dataclass(frozen=True)
class CycleCost:
    """Time of one cycle of all sequences, per device.

    Attributes:
      limits: milliseconds by roofline, of operations by what limits each; see `LIMITS`.
      cycles_ms: by the compiler's cycles; kernels, which have none, at the roofline.
    """

    limits: Mapping[str, float]
    cycles_ms: float

    @property
    def roofline_ms(self) -> float:
        """Every operation one after the other, at the rates of the compiler's roofline."""
        return sum(self.limits.values())

    @property
    def largest(self) -> tuple[str, float]:
        """What limits most of the time, and its share."""
        name = max(self.limits, key=self.limits.get)
        return name, self.limits[name] / self.roofline_ms

    def plus(self, other: "CycleCost", times: float) -> "CycleCost":
        """This cost and `times` another."""
        names = {**self.limits, **other.limits}
        return CycleCost(
            {
                name: self.limits.get(name, 0.0) + times * other.limits.get(name, 0.0)
                for name in names
            },
            self.cycles_ms + times * other.cycles_ms,
        )


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each device.

    Attributes:
      fixed: weights, temporaries, programs, and what is kept of a sequence of any length.
      per_token: caches of all sequences, for each token of context.
    """

    fixed: float
    per_token: float

    def at(self, context: int) -> float:
        """With so many tokens in each sequence."""
        return self.fixed + context * self.per_token


@dataclasses.dataclass(frozen=True)
class StrategyPoint:
    """One strategy with one number of sequences, as compiled. Costs are linear in the context.

    Attributes:
      strategy: its name.
      batch: sequences.
      rows: that the target verifies of each sequence.
      fixed: cost without any context.
      per_token: what each token of context adds.
      memory: on each device.
      collectives: by kind, how many a cycle runs and the bytes of their results.
    """

    strategy: str
    batch: int
    rows: int
    fixed: CycleCost
    per_token: CycleCost
    memory: DeviceMemory
    collectives: Mapping[str, tuple[float, float]]

    def cost(self, context: int) -> CycleCost:
        """Of a cycle after `context` tokens of each sequence."""
        return self.fixed.plus(self.per_token, context)


@dataclasses.dataclass(frozen=True)
class ExpectedSpeedup:
    """A strategy at one batch and context, for one task.

    Attributes:
      strategy: its name.
      tokens: τ.
      speedup: over plain decoding, by roofline.
      by_cycles: the same by the compiler's cycles; None where the chip's clock is unknown.
      tokens_per_s: of all sequences together, by roofline.
    """

    strategy: str
    tokens: float
    speedup: float
    by_cycles: float | None
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class Forecast:
    """All points, and what is expected to be accepted.

    Attributes:
      points: plain decoding and every strategy, by name and batch.
      tokens: τ by strategy and task; strategies of which nothing is known are missing.
      capacity_bytes: memory of a device.
    """

    points: Mapping[tuple[str, int], StrategyPoint]
    tokens: Mapping[str, Mapping[str, float]]
    capacity_bytes: float

    @property
    def strategies(self) -> list[str]:
        """Names: plain decoding, then by rows."""
        rows = {name: point.rows for (name, _), point in self.points.items()}
        return sorted(rows, key=lambda name: (name != PLAIN, rows[name], name))

    @property
    def tasks(self) -> list[str]:
        """Those that some strategy's acceptance is known for."""
        return list(dict.fromkeys(task for one in self.tokens.values() for task in one))

    @property
    def batches(self) -> list[int]:
        """Ascending."""
        return sorted({batch for _, batch in self.points})

    def fits(self, strategy: str, batch: int, context: int) -> bool:
        """Whether a device has the memory."""
        point = self.points[strategy, batch]
        return point.memory.at(context + point.rows) <= self.capacity_bytes

    def expected(
        self, strategy: str, task: str, batch: int, context: int
    ) -> ExpectedSpeedup | None:
        """What a strategy brings; None where its acceptance is unknown or it does not fit."""
        tokens = 1.0 if strategy == PLAIN else self.tokens.get(strategy, {}).get(task)
        if tokens is None or not self.fits(strategy, batch, context):
            return None
        own = self.points[strategy, batch].cost(context)
        plain = self.points[PLAIN, batch].cost(context)
        return ExpectedSpeedup(
            strategy,
            tokens,
            tokens * plain.roofline_ms / own.roofline_ms,
            tokens * plain.cycles_ms / own.cycles_ms if own.cycles_ms else None,
            1e3 * batch * tokens / own.roofline_ms,
        )

    def best(self, task: str, batch: int, context: int) -> ExpectedSpeedup | None:
        """The strategy of most tokens a second, plain decoding among them; None: nothing fits."""
        found = [self.expected(name, task, batch, context) for name in self.strategies]
        return max((one for one in found if one), key=lambda one: one.speedup, default=None)

    def mean(self, strategy: str, batch: int, context: int) -> float | None:
        """Mean speed-up of a strategy over the tasks, by roofline; None where one is unknown."""
        found = [self.expected(strategy, task, batch, context) for task in self.tasks]
        return _mean(one and one.speedup for one in found)

    def best_on_average(self, batch: int, context: int) -> tuple[str, float] | None:
        """The strategy with the largest mean over the tasks, and that mean; None: nothing fits."""
        found = [(name, self.mean(name, batch, context)) for name in self.strategies]
        known = [(name, mean) for name, mean in found if mean is not None]
        return max(known, key=lambda one: one[1], default=None)

    def needed_tokens(self, strategy: str, batch: int, context: int, speedup: float = 1.0) -> float:
        """τ at which a strategy reaches a speed-up over plain decoding, by roofline."""
        own = self.points[strategy, batch].cost(context)
        return speedup * own.roofline_ms / self.points[PLAIN, batch].cost(context).roofline_ms


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if not found or None in found else sum(found) / len(found)
