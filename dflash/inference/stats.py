"""Statistics of a scheduler."""

import dataclasses


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
      speculation_lookups: Verifications whose outcome was looked up in the speculation cache.
      speculation_hits: Part of `speculation_lookups` whose outcome had been foreseen.
      redrafted_cycles: Part of `cycles` after which all sequences drafted anew, because an outcome
        had not been foreseen.
    """

    waiting: int
    prefilling: int
    running: int
    pages_used: int
    pages_cached: int
    pages_total: int
    preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    prefill_tokens: int
    prefill_chunks: int
    prefill_dispatches: int
    prefill_prompts: int
    prefill_seconds: float
    stalled_seconds: float
    decode_seconds: float
    dispatches: int
    cycles: int
    slot_cycles: int
    queued_cycles: int
    queued_slot_cycles: int
    speculation_lookups: int
    speculation_hits: int
    redrafted_cycles: int


# Names of the statistics that are summed up over time, unlike the current load.
COUNTERS = (
    "preemptions",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "prefill_tokens",
    "prefill_chunks",
    "prefill_dispatches",
    "prefill_prompts",
    "prefill_seconds",
    "stalled_seconds",
    "decode_seconds",
    "dispatches",
    "cycles",
    "slot_cycles",
    "queued_cycles",
    "queued_slot_cycles",
    "speculation_lookups",
    "speculation_hits",
    "redrafted_cycles",
)
