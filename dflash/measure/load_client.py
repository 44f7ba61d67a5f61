"""Client that loads a server, in a process of its own.

    python -m dflash.measure.load_client < plan.json

It reads a `LoadPlan` as JSON from stdin, and writes a list of `Answer`s as JSON to stdout. It does
not import jax, so that it leaves the processor to the server.
"""

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx

_TIMEOUT_S = 3600.0


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Requests to send, and their times.

    Attributes:
      bodies: JSON bodies for /v1/completions.
      at_a_time: Number of concurrent requests: each one that ends starts the next. None starts
        requests at random times, independently of each other.
      rate: Mean requests per second, if they start at random times.
    """

    url: str
    bodies: Sequence[dict[str, Any]]
    at_a_time: int | None = None
    rate: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """Outcome of a request; times are in seconds since the start of the plan.

    Attributes:
      arrivals: Times at which tokens arrived; one event may bring several.
    """

    begin: float
    arrivals: Sequence[float] = ()
    tokens: int = 0
    cycles: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Time at which the first token arrived, or 0."""
        return self.arrivals[0] if self.arrivals else 0.0

    @property
    def last(self) -> float:
        """Time at which the last token arrived, or 0."""
        return self.arrivals[-1] if self.arrivals else 0.0


async def run(plan: LoadPlan) -> list[Answer]:
    """Sends all requests, and returns their outcomes in the same order."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
        zero = time.perf_counter()
        if plan.at_a_time is None:
            return await _open_loop(plan, client, zero)
        return await _closed_loop(plan, client, zero)


async def _closed_loop(plan: LoadPlan, client, zero: float) -> list[Answer]:
    free = asyncio.Semaphore(plan.at_a_time)

    async def ask(body):
        async with free:
            return await _ask(client, plan.url, body, zero)

    return await asyncio.gather(*map(ask, plan.bodies))


async def _open_loop(plan: LoadPlan, client, zero: float) -> list[Answer]:
    draw, at, tasks = random.Random(plan.seed), 0.0, []
    for body in plan.bodies:
        await asyncio.sleep(max(0.0, zero + at - time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(client, plan.url, body, zero)))
        at += draw.expovariate(plan.rate)
    return await asyncio.gather(*tasks)


async def _ask(client, url: str, body: dict[str, Any], zero: float) -> Answer:
    begin = time.perf_counter() - zero
    options = {"include_usage": True}
    request = {**body, "stream": True, "stream_options": options, "include_metrics": True}
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=request) as answer:
            if answer.status_code != 200:
                return Answer(begin, error=(await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now, event = time.perf_counter() - zero, json.loads(line[len("data: ") :])
                if "error" in event:
                    return Answer(begin, error=event["error"]["message"])
                if event["choices"]:
                    arrivals.append(now)
                usage, metrics = event["usage"] or usage, event.get("metrics", metrics)
    except httpx.HTTPError as error:
        return Answer(begin, error=f"{type(error).__name__}: {error}")
    cycles = metrics["speculative_decoding"]["num_spec_steps"]
    return Answer(begin, arrivals, usage["completion_tokens"], cycles)


if __name__ == "__main__":
    answers = asyncio.run(run(LoadPlan(**json.load(sys.stdin))))
    json.dump([dataclasses.asdict(answer) for answer in answers], sys.stdout)
