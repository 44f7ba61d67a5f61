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
      dispatches: dispatches of cycles that were collected.
      cycles: cycles in them.
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
    dispatches: int
    cycles: int
