"""What a scheduler reports of itself."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """What a scheduler holds now, and what it has done since it was made.

    Attributes:
      waiting: requests in the queue, those that were preempted included.
      prefilling: requests that hold a slot while their prompt is computed.
      running: requests that are being decoded.
      pages_used: pages of the target's cache that requests hold.
      pages_cached: pages that no request holds, but that the prefix cache keeps.
      pages_total: pages that can be handed out, over all shares.
      preemptions: how often a request had to give up its slot for want of pages.
      prefix_queries_tokens: prompt tokens that were looked up in the prefix cache.
      prefix_hits_tokens: those of them that it held.
      prefill_tokens: prompt tokens that were computed.
      prefill_chunks: chunks of prompts that were computed.
      prefill_dispatches: programs that computed them, a chunk in every lane at a time.
      prefill_prompts: prompts that were computed to their end.
      prefill_seconds: time of these programs.
      stalled_seconds: the part of it in which sequences of the batch stood still.
      decode_seconds: time of dispatches of cycles.
      dispatches: dispatches of cycles that were collected.
      cycles: cycles in them.
      slot_cycles: cycles of single slots that committed tokens.
      queued_cycles, queued_slot_cycles: the same two of dispatches during which requests waited for
        a slot.
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
