"""Expected speed-ups, from the compiler's cost of a cycle and known acceptance.

For a strategy with batch size B and a context of c tokens,

    speed-up = τ · T_plain(B, c) / T_cycle(B, c),

where the mean acceptance length τ is the mean number of tokens that a cycle commits per sequence.
Nothing was measured on a chip. Host time is neglected, because the loop over cycles runs on the
device.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

# Bottlenecks of an operation in the roofline model: reading weights, reading the output head and
# writing logits, reading the context, arithmetic, and any other memory traffic.
WEIGHTS, HEAD, CONTEXT, ARITHMETIC, REST = LIMITS = (
    "weights", "output head", "context", "arithmetic", "rest",
)  # fmt: skip
PLAIN = "plain"  # Name of decoding without drafts.


@dataclasses.dataclass(frozen=True)
class CompiledCost:
    """Time of one cycle of the whole batch, per device.

    Attributes:
      limits: Roofline time in ms, summed over operations by their bottleneck; see `LIMITS`.
      cycles_ms: Time by the compiler's cycles in ms. Kernels, which have none, count by roofline.
    """

    limits: Mapping[str, float]
    cycles_ms: float

    @property
    def roofline_ms(self) -> float:
        """Returns the time of all operations in sequence by the compiler's roofline, in ms."""
        return sum(self.limits.values())

    @property
    def bottleneck(self) -> tuple[str, float]:
        """Returns the dominant bottleneck and its fraction of the roofline time."""
        name = max(self.limits, key=self.limits.get)
        return name, self.limits[name] / self.roofline_ms

    def plus(self, other: "CompiledCost", times: float) -> "CompiledCost":
        """Returns `self + times * other`."""
        names = {**self.limits, **other.limits}
        return CompiledCost(
            {
                name: self.limits.get(name, 0.0) + times * other.limits.get(name, 0.0)
                for name in names
            },
            self.cycles_ms + times * other.cycles_ms,
        )


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Memory use of each device, linear in the context length.

    Attributes:
      fixed: Bytes of weights, temporaries, programs and state that do not depend on the context.
      per_token: Bytes that each token of context adds to the caches of all sequences together.
    """

    fixed: float
    per_token: float

    def at(self, context: int) -> float:
        """Returns the bytes with `context` tokens in each sequence."""
        return self.fixed + context * self.per_token


@dataclasses.dataclass(frozen=True)
class StrategyPoint:
    """Compiled cost of one strategy at one batch size.

    It is linear in the context length, but for layers with a window, which is linear up to there.

    Attributes:
      strategy: Name of the strategy.
      batch: Number of sequences.
      rows: Rows per sequence that the target verifies.
      fixed: Cost of a cycle with an empty context.
      per_token: Cost that each token of context adds.
      memory: Memory use of each device.
      collectives: Number of collectives per cycle and total bytes of their results, by kind.
      in_windows: Cost that each token of context adds to draft layers with a window, up to the
        window, by window.
    """

    strategy: str
    batch: int
    rows: int
    fixed: CompiledCost
    per_token: CompiledCost
    memory: DeviceMemory
    collectives: Mapping[str, tuple[float, float]]
    in_windows: Mapping[int, CompiledCost] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns a point from the JSON values of its fields."""
        fields = {
            "fixed": CompiledCost(**value["fixed"]),
            "per_token": CompiledCost(**value["per_token"]),
            "memory": DeviceMemory(**value["memory"]),
            "collectives": {kind: tuple(sums) for kind, sums in value["collectives"].items()},
            "in_windows": {
                int(window): CompiledCost(**cost) for window, cost in value["in_windows"].items()
            },
        }
        return cls(**value | fields)

    def cost(self, context: int) -> CompiledCost:
        """Returns the cost of a cycle with `context` tokens in each sequence."""
        whole = self.fixed.plus(self.per_token, context)
        for window, per_token in self.in_windows.items():
            whole = whole.plus(per_token, min(context, window))
        return whole


@dataclasses.dataclass(frozen=True)
class ExpectedSpeedup:
    """Expected speed-up of a strategy at one batch size and context, on one task.

    Attributes:
      strategy: Name of the strategy.
      tokens: Mean acceptance length (τ).
      speedup: Speed-up over plain decoding, by roofline.
      by_cycles: Speed-up by the compiler's cycles; None if the chip's clock rate is unknown.
      tokens_per_s: Tokens per second of the whole batch, by roofline.
    """

    strategy: str
    tokens: float
    speedup: float
    by_cycles: float | None
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Costs and acceptance of several strategies.

    Attributes:
      points: Costs of plain decoding and of every strategy, by name and batch size. Rows are
        divided only where there are several sequences, so some strategies lack some batch sizes.
      tokens: Mean acceptance length (τ) by strategy and task. Strategies of unknown acceptance are
        missing.
      capacity_bytes: Memory of a device in bytes.
    """

    points: Mapping[tuple[str, int], StrategyPoint]
    tokens: Mapping[str, Mapping[str, float]]
    capacity_bytes: float

    @property
    def strategies(self) -> list[str]:
        """Returns the names of the strategies: plain decoding first, the others by rows."""
        rows = {name: point.rows for (name, _), point in self.points.items()}
        return sorted(rows, key=lambda name: (name != PLAIN, rows[name], name))

    @property
    def tasks(self) -> list[str]:
        """Returns the tasks for which the acceptance of a strategy is known."""
        return list(dict.fromkeys(task for by_task in self.tokens.values() for task in by_task))

    @property
    def batches(self) -> list[int]:
        """Returns the batch sizes, ascending."""
        return sorted({batch for _, batch in self.points})

    def fits(self, strategy: str, batch: int, context: int) -> bool:
        """Returns whether a strategy exists for this batch size and fits in device memory."""
        point = self.points.get((strategy, batch))
        return point is not None and point.memory.at(context + point.rows) <= self.capacity_bytes

    def expected(
        self, strategy: str, task: str, batch: int, context: int
    ) -> ExpectedSpeedup | None:
        """Returns a strategy's speed-up; None if its acceptance is unknown or it does not fit."""
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
        """Returns the fastest strategy, which may be plain decoding; None if nothing fits."""
        choices = [self.expected(name, task, batch, context) for name in self.strategies]
        return max(filter(None, choices), key=lambda choice: choice.speedup, default=None)

    def mean(self, strategy: str, batch: int, context: int) -> float | None:
        """Returns the mean speed-up over all tasks, by roofline; None if one of them is unknown."""
        choices = [self.expected(strategy, task, batch, context) for task in self.tasks]
        return _mean(choice and choice.speedup for choice in choices)

    def best_on_average(self, batch: int, context: int) -> tuple[str, float] | None:
        """Returns the strategy with the largest mean speed-up and that mean; None if none fits."""
        means = [(name, self.mean(name, batch, context)) for name in self.strategies]
        known = [(name, mean) for name, mean in means if mean is not None]
        return max(known, key=lambda pair: pair[1], default=None)

    def needed_tokens(
        self, strategy: str, batch: int, context: int, speedup: float = 1.0
    ) -> float | None:
        """Returns the mean acceptance length (τ) that a speed-up requires, by roofline.

        It is None if the strategy lacks this batch size.
        """
        if (strategy, batch) not in self.points:
            return None
        own = self.points[strategy, batch].cost(context)
        return speedup * own.roofline_ms / self.points[PLAIN, batch].cost(context).roofline_ms


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = list(values)
    return None if not numbers or None in numbers else sum(numbers) / len(numbers)
