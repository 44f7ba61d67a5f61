"""A line on stderr every ten seconds while the server is busy."""

import asyncio
import copy
import sys
import time

from dflash.serving.metrics import Totals
from dflash.serving.service import Service

EVERY_S = 10.0


async def write_log(service: Service) -> None:
    """Writes lines for as long as it is not cancelled."""
    before, begin = copy.deepcopy(service.metrics.totals), time.perf_counter()
    while True:
        await asyncio.sleep(EVERY_S)
        now, end = copy.deepcopy(service.metrics.totals), time.perf_counter()
        if service.in_flight or now.output_tokens > before.output_tokens:
            print(line(service, before, now, end - begin), file=sys.stderr, flush=True)
        before, begin = now, end


def line(service: Service, before: Totals, now: Totals, seconds: float) -> str:
    """What happened between two moments, with vLLM's words for what was drafted."""
    every = list(service.stats.values())
    pages = sum(one.pages_total for one in every)
    used = sum(one.pages_used for one in every) / pages if pages else 0.0
    asked = sum(one.prefix_queries_tokens for one in every)
    hits = sum(one.prefix_hits_tokens for one in every)
    parts = [
        f"Running: {sum(one.running + one.prefilling for one in every)} reqs",
        f"Waiting: {sum(one.waiting for one in every)} reqs",
        f"prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s",
        "generation throughput: "
        f"{(now.output_tokens - before.output_tokens) / seconds:.1f} tokens/s",
        f"KV cache usage: {100 * used:.1f}%",
        f"Prefix cache hit rate: {100 * hits / asked if asked else 0:.1f}%",
    ]
    said = ", ".join(parts)
    cycles, drafted = now.cycles - before.cycles, now.drafted - before.drafted
    if not cycles:
        return said
    accepted = now.accepted - before.accepted
    at = [
        (late - early) / cycles
        for late, early in zip(now.accepted_at, before.accepted_at, strict=True)
    ]
    rate = f"{100 * accepted / drafted:.1f}%" if drafted else "–"
    return (
        f"{said}\nSpecDecoding metrics: Mean acceptance length: {1 + accepted / cycles:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{one:.3f}' for one in at)}, "
        f"Avg Draft acceptance rate: {rate}"
    )
