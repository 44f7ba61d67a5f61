"""Statistics of a scheduler."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """Current load of a scheduler, and its counters since its creation.

    Attributes:
      waiting: Requests in the queue, preempted ones included.
      prefilling: Requests that hold a slot while their prompt is prefilled.
      running: Requests that are being decoded.
      pages_used: Pages of the target's cache held by requests.
      pages_cached: Pages kept only by the prefix cache.
      pages_total: Pages of all data replicas, scratch pages excluded.
      preemptions: Number of times that a request lost its slot because pages ran out.
      prefix_queries_tokens: Prompt tokens looked up in the prefix cache.
      prefix_hits_tokens: Prompt tokens found in the prefix cache.
      prefill_tokens: Prompt tokens computed.
      prefill_chunks: Prompt chunks computed.
      prefill_dispatches: Prefill calls, each with up to one chunk per prefill slot.
      prefill_prompts: Prompts whose prefill was completed.
      prefill_seconds: Time of prefill calls, in seconds.
      stalled_seconds: Part of `prefill_seconds` during which running requests waited.
      decode_seconds: Time of dispatches of cycles, in seconds.
      dispatches: Dispatches of cycles whose results were collected.
      cycles: Cycles of these dispatches.
      slot_cycles: Cycles that committed tokens, counted per slot.
      queued_cycles: Part of `cycles` in dispatches during which requests waited for a slot.
      queued_slot_cycles: Part of `slot_cycles` in the same dispatches.
      events: Counts that the kind of engine takes itself, by name; see `Report`.
    """

    waiting: int
    prefilling: int
    running: int
    pages_used: int
    pages_cached: int
    pages_total: int
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prefill_tokens: int = 0
    prefill_chunks: int = 0
    prefill_dispatches: int = 0
    prefill_prompts: int = 0
    prefill_seconds: float = 0.0
    stalled_seconds: float = 0.0
    decode_seconds: float = 0.0
    dispatches: int = 0
    cycles: int = 0
    slot_cycles: int = 0
    queued_cycles: int = 0
    queued_slot_cycles: int = 0
    events: Mapping[str, int] = dataclasses.field(default_factory=dict)


# Names of the statistics that are summed up over time, unlike the current load.
COUNTERS = tuple(field.name for field in dataclasses.fields(SchedulerStats) if field.default == 0)
