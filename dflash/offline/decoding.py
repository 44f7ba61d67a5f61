"""Decoding of a list of requests, the simplest client of the scheduler, and its utilization."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dflash.inference.engine import Engine
from dflash.inference.request import Event, Request, RequestOutput
from dflash.inference.scheduler import Scheduler
from dflash.inference.stats import SchedulerStats


@dataclasses.dataclass
class Usage:
    """Counts since one start of a run, over all its rounds.

    Attributes:
      seconds: Time from the first prompt to the last token without compiling, in seconds.
      counts: Counts of the scheduler by name; see `SchedulerStats`.
      events: Counts of the engine by name; see `SchedulerStats`.
      others_share: See `Load`.
    """

    slots: int = 0
    tokens: int = 0
    seconds: float = 0.0
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    events: dict[str, int] = dataclasses.field(default_factory=dict)
    others_share: float | None = None

    def add(self, stats: SchedulerStats, *, slots: int, tokens: int, seconds: float) -> None:
        """Adds the counts of a round."""
        self.slots = slots
        self.tokens += tokens
        self.seconds += seconds
        counts = dataclasses.asdict(stats)
        for all_counts, more in ((self.events, counts.pop("events")), (self.counts, counts)):
            for name, value in more.items():
                all_counts[name] = all_counts.get(name, 0) + value

    def facts(self) -> dict[str, Any]:
        """Returns the figures for results.json; empty if nothing was decoded."""
        if not self.counts:
            return {}
        counts, cycles = self.counts, self.counts["cycles"]
        busy_s = counts["prefill_seconds"] + counts["decode_seconds"]
        return {
            "prefill": {
                "dispatches": counts["prefill_dispatches"],
                "prompts": counts["prefill_prompts"],
                "seconds": counts["prefill_seconds"],
            },
            "slots": {
                "busy_share": self._share("slot_cycles", "cycles"),
                "busy_share_while_queued": self._share("queued_slot_cycles", "queued_cycles"),
                "stood_still_share": counts["stalled_seconds"] / busy_s if busy_s else None,
            },
            "tokens_per_second_end_to_end": self.tokens / self.seconds if self.seconds else None,
            "mean_cycle_ms": 1e3 * counts["decode_seconds"] / cycles if cycles else None,
            "others_share": self.others_share,
            **({"events": self.events} if self.events else {}),
        }

    def _share(self, busy: str, cycles: str) -> float | None:
        total = self.slots * self.counts[cycles]
        return self.counts[busy] / total if total else None


def decode(
    engine: Engine,
    requests: Iterable[Request],
    tell: Callable[[SchedulerStats], None] = lambda stats: None,
) -> Iterator[Event]:
    """Decodes requests in order of arrival, as many at a time as there are slots.

    Args:
      tell: Called at the end with the scheduler's statistics.
    Yields:
      Tokens as they are committed, and one RequestOutput per request after its last Tokens.
    Raises:
      InputError: A request cannot be decoded. It is raised before any request has started.
      UserError: A request has failed, such as by logits that are not finite.
    """
    scheduler = Scheduler(engine, fill_at_once=True)
    for request in requests:
        scheduler.submit(request)
    while not scheduler.idle:
        for event in scheduler.step():
            if isinstance(event, RequestOutput) and event.error is not None:
                raise event.error
            yield event
    tell(scheduler.stats())
    scheduler.close()
