"""Log of a busy server: throughput, cache use and acceptance, every ten seconds."""

import asyncio
import copy
import itertools
import sys
import time

from dflash.config.schema import DrafterConfig
from dflash.runs import block_advice
from dflash.serving.metrics import Totals
from dflash.serving.service import Service

EVERY_S = 10.0
ADVISE_AFTER = 1000  # Cycles after which acceptance is known well enough to advise on blocks.


async def write_log(service: Service, drafter: DrafterConfig) -> None:
    """Writes log lines to stderr until it is cancelled.

    Args:
      service: Service that is logged.
      drafter: Config of the drafter, on whose block size the log advises once.
    """
    advised = False
    before, begin = copy.deepcopy(service.metrics.totals), time.perf_counter()
    while True:
        await asyncio.sleep(EVERY_S)
        now, end = copy.deepcopy(service.metrics.totals), time.perf_counter()
        if service.in_flight or now.output_tokens > before.output_tokens:
            print(line(service, before, now, end - begin), file=sys.stderr, flush=True)
        if not advised and now.cycles >= ADVISE_AFTER:
            advised = True
            for advice in block_advice.longer_than_needed(drafter, acceptance(now)):
                print(advice, file=sys.stderr, flush=True)
        before, begin = now, end


def acceptance(totals: Totals) -> block_advice.BlockAcceptance:
    """Returns the acceptance lengths of all cycles that verified drafts."""
    reached = [totals.cycles, *totals.accepted_at, 0]  # Cycles with at least n accepted drafts.
    exact = [more - fewer for more, fewer in itertools.pairwise(reached)]
    cycles = {drafts + 1: count for drafts, count in enumerate(exact)}
    return block_advice.BlockAcceptance(cycles, len(totals.accepted_at) + 1)


def line(service: Service, before: Totals, now: Totals, seconds: float) -> str:
    """Returns the log lines of an interval, in vLLM's format.

    Args:
      service: Service that is logged.
      before: Counts at the beginning of the interval.
      now: Counts at the end of the interval.
      seconds: Duration of the interval.
    """
    schedulers = list(service.stats.values())
    pages = sum(stats.pages_total for stats in schedulers)
    used = sum(stats.pages_used for stats in schedulers) / pages if pages else 0.0
    queries = sum(stats.prefix_queries_tokens for stats in schedulers)
    hits = sum(stats.prefix_hits_tokens for stats in schedulers)
    parts = [
        f"Running: {sum(stats.running + stats.prefilling for stats in schedulers)} reqs",
        f"Waiting: {sum(stats.waiting for stats in schedulers)} reqs",
        f"prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s",
        "generation throughput: "
        f"{(now.output_tokens - before.output_tokens) / seconds:.1f} tokens/s",
        f"KV cache usage: {100 * used:.1f}%",
        f"Prefix cache hit rate: {100 * hits / queries if queries else 0:.1f}%",
    ]
    throughput = ", ".join(parts)
    cycles, drafted = now.cycles - before.cycles, now.drafted - before.drafted
    if not cycles:
        return throughput
    accepted, committed = now.accepted - before.accepted, now.committed - before.committed
    rates = [
        (late - early) / cycles
        for late, early in zip(now.accepted_at, before.accepted_at, strict=True)
    ]
    mean_rate = f"{100 * accepted / drafted:.1f}%" if drafted else "–"
    return (
        f"{throughput}\nSpecDecoding metrics: Mean acceptance length: {committed / cycles:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{one:.3f}' for one in rates)}, "
        f"Avg Draft acceptance rate: {mean_rate}"
    )
