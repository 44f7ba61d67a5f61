"""Soaks a server with requests of mixed lengths, some of them cancelled or malformed.

    python tools/soak_server.py --requests=2000

The server has a small random target, and too few pages, so that requests are preempted. At the end,
complete answers must equal those of plain decoding, and /metrics must show no held resources.
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import pathlib
import random
import re
import sys
import tempfile
import time

import httpx2 as httpx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from support import served

PAGES = ("decode.num_pages=11", "decode.page_size=16", "serve.queue=512")
MALFORMED = (
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "unknown": true}',
    b'{"prompt": [999999]}',
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
      body: JSON body to send; bytes are a malformed body.
      cancel_after_s: Seconds after which the client disconnects; None to wait for the answer.
    """

    body: dict | bytes
    cancel_after_s: float | None = None


def cases(count: int, seed: int, vocab_size: int = 128, longest: int = 128) -> list[Case]:
    """Returns requests of mixed lengths with repeated prefixes, 20 % cancelled, 5 % malformed."""
    draw, found = random.Random(seed), []
    prefixes = [[draw.randrange(vocab_size) for _ in range(48)] for _ in range(4)]
    for number in range(count):
        if draw.random() < 0.05:
            found.append(Case(draw.choice(MALFORMED)))
            continue
        prompt = [draw.randrange(vocab_size) for _ in range(draw.choice((1, 7, 30)))]
        if draw.random() < 0.4:
            prompt = draw.choice(prefixes) + prompt
        room = longest - len(prompt)
        body = {
            "prompt": prompt,
            "max_tokens": draw.randint(1, min(room, 40)),
            "temperature": draw.choice((0, 0.8)),
            "seed": number,
            "stream": draw.random() < 0.5,
        }
        gone = draw.random() < 0.2
        found.append(Case(body, draw.uniform(0, 0.5) if gone else None))
    return found


async def soak(url: str, every: list[Case], at_a_time: int) -> list[tuple[Case, str, str]]:
    """Sends all requests; returns (case, outcome, text) of each.

    The outcome is "whole", "cancelled", "rejected" or "wrong".
    """
    free = asyncio.Semaphore(at_a_time)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def one(case: Case) -> tuple[Case, str, str]:
            async with free:
                try:
                    async with asyncio.timeout(case.cancel_after_s):
                        return case, *await ask(client, url, case)
                except TimeoutError:
                    return case, "cancelled", ""

        return await asyncio.gather(*map(one, every))


async def ask(client, url: str, case: Case) -> tuple[str, str]:
    """Sends one request; returns its outcome and text."""
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    headers = {"Content-Type": "application/json"}
    answer = await client.post(f"{url}/v1/completions", content=content, headers=headers)
    if answer.status_code in (400, 429):
        return "rejected", answer.json()["error"]["message"]
    if answer.status_code != 200:
        return "wrong", answer.text
    if not case.body["stream"]:
        return "whole", answer.json()["choices"][0]["text"]
    events = answer.text.split("\n\n")
    if events[-2] != "data: [DONE]":
        return "wrong", answer.text[-200:]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return "whole", "".join(event["choices"][0]["text"] for event in parsed)


def left_behind(server: served.Server) -> dict[str, float]:
    """Returns the metrics of requests and pages that are still held, without zeros."""
    text = server.get("/metrics")[1].decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = {name: float(re.search(rf"^vllm:{name}{{.*}} (.*)$", text, re.M)[1]) for name in names}
    return {name: value for name, value in found.items() if value}


def count(server: served.Server, name: str) -> float:
    """Returns the value of a counter."""
    text = server.get("/metrics")[1].decode()
    return float(re.search(rf"^{name}{{.*}} (.*)$", text, re.M)[1])


def resident_mib(pid: int) -> float:
    """Returns the resident memory of a process, in MiB."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def problems(server: served.Server, done: list[tuple[Case, str, str]]) -> list[str]:
    """Returns the problems after a soak: wrong texts, valid requests rejected, resources held."""
    found = []
    for case, outcome, text in done:
        malformed = isinstance(case.body, bytes)
        if outcome == "wrong" or (outcome == "rejected") != malformed:
            found.append(f"{outcome}: {text} for {case.body}")
        elif outcome == "whole":
            how = {key: case.body[key] for key in ("max_tokens", "temperature", "seed")}
            wanted = bytes(served.decoded(server.config, case.body["prompt"], **how)).decode()
            if text != wanted:
                found.append(f"wrong text: {text!r}, wanted {wanted!r} for {case.body}")
    served.wait_until(lambda: not left_behind(server), "release of all slots and pages")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at_a_time", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    every = cases(given.requests, given.seed)
    with (
        tempfile.TemporaryDirectory() as directory,
        served.serving(pathlib.Path(directory), *PAGES) as server,
    ):
        asyncio.run(soak(server.url, every[: len(every) // 4], given.at_a_time))
        before, begin = resident_mib(server.process.pid), time.perf_counter()
        done = asyncio.run(soak(server.url, every, given.at_a_time))
        seconds = time.perf_counter() - begin
        after = resident_mib(server.process.pid)
        wrong = problems(server, done)
        print(dict(collections.Counter(outcome for _, outcome, _ in done)), f"{seconds:.0f} s")
        print(f"preemptions {count(server, 'vllm:num_preemptions_total'):.0f}")
        print(f"prefix hits {count(server, 'vllm:prefix_cache_hits_total'):.0f} tokens")
        print(f"resident memory {before:.0f} -> {after:.0f} MiB")
    print("\n".join(wrong) or "no problems")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
