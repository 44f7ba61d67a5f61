"""Sends fuzzed requests to a server beside eight honest clients.

    python tools/fuzz_server.py --requests=2000
    python tools/fuzz_server.py --requests=2000 --config=configs/tiny_dflash.yml

A fuzzed request has a number at the edge of float32, int32 or int64 in one of its fields, malformed
framing, or a client that reads its answer slowly or not at all. The honest clients' outputs must be
those that they get alone, the process must live, and no answer may have status 500. Prints how many
honest answers took more than twice their time without fuzzed requests and a second, with the fuzzed
requests that were then under way, and the resident memory.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from support import served

from dflash.serving import bodies, responses_api

OPTIONS = ("serve.read_s=2", "serve.send_s=2", "serve.queue=1024")
NUM_HONEST = 8
PATIENCE_S = 120.0
ALONE_S = 30.0  # Time during which the honest clients are measured without fuzzed requests.
LEAVE_S = 3.0  # Clients that send malformed requests leave after this time.
EDGES = (
    *(0, -0.0, 0.5, 1, -1, True, None, "1", "", [], {}, [1], {"1": 1}, "\ud800", "a" * 70_000),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30, 10**400),
    *(5e-324, 1e-45, 1.2e-38, 5e-38, 1e-7, 9e37, 3.4028234e38, 3.4028236e38, 1e39, 1.79e308),
    *(float("inf"), float("-inf"), float("nan")),
)
USER = {"role": "user", "content": "abc"}
# A valid body of each endpoint, and the model of its fields.
TARGETS = {
    "/v1/completions": ({"prompt": "abcabc", "max_tokens": 4}, bodies.CompletionBody),
    "/v1/chat/completions": ({"messages": [USER], "max_tokens": 4}, bodies.ChatBody),
    "/v1/responses": ({"input": "abc", "max_output_tokens": 4}, responses_api.ResponsesBody),
    "/generate": ({"text": "abc", "sampling_params": {"max_new_tokens": 4}}, bodies.GenerateBody),
    "/tokenize": ({"prompt": "abc"}, bodies.TokenizeTextBody),
    "/detokenize": ({"tokens": [1, 2, 3]}, bodies.DetokenizeBody),
}
# Other fields beside the fuzzed one; each led to a different program or check.
BESIDE = (
    {},
    {"min_tokens": 2},
    {"temperature": 0.7, "seed": 3},
    {"logprobs": 2},
    {"stop": "zz", "n": 2},
    {"guided_regex": "[ab]{1,4}", "stop_token_ids": [0]},
    {"temperature": 1.0, "top_p": 0.5, "top_k": 3},
    {"stream": True},
)
LARGE = {"prompt": "abc", "max_tokens": 64, "n": 16, "logprobs": 20, "temperature": 1.0, "seed": 1}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MALFORMED = (
    b"",
    b"\x00\xff\x00\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    HEAD + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    HEAD + b"X: 1\r\n" * 20_000 + b"\r\n",
    HEAD + b"Host: other\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: 1e3\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n{}",
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    HEAD + b"Content-Length: 50\r\n\r\n{}",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000,
    HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n{}",
    HEAD
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 30\r\n\r\nGET /health HTTP/1.1\r\n",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") * 100,
)


@dataclasses.dataclass(frozen=True)
class Fuzz:
    """A fuzzed request.

    Attributes:
      name: Kind of the request, and what is fuzzed.
      content: Bytes to send.
      answered: Whether the server must answer, and close the connection.
      pause_s: Seconds between reads of one byte, after ten of which the client leaves; None reads
        at full speed.
    """

    name: str
    content: bytes
    answered: bool = False
    pause_s: float | None = None


def request(path: str, body: dict | bytes, *, close: bool = True) -> bytes:
    """Returns a well-formed POST as bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n" + "Connection: close\r\n" * close + "\r\n"
    ).encode() + content


def fuzzed(count: int, seed: int) -> Iterator[Fuzz]:
    """Yields fuzzed requests, the same ones for a seed."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.random()
        if kind < 0.75:
            yield _number(draw)
        elif kind < 0.9:
            place = draw.randrange(len(MALFORMED))
            yield Fuzz(f"malformed {place}", MALFORMED[place])
        else:
            body = LARGE | {"stream": draw.random() < 0.5}
            pause_s = draw.choice((0.02, 0.5))
            yield Fuzz(f"reader {pause_s}", request("/v1/completions", body), pause_s=pause_s)


def _number(draw: random.Random) -> Fuzz:
    """Returns a request with an edge in one of its fields, sometimes within a list or object."""
    path = draw.choice(list(TARGETS))
    valid, model = TARGETS[path]
    valid = json.loads(json.dumps(valid))
    inside = valid
    if path == "/generate" and draw.random() < 0.7:
        inside, model = valid["sampling_params"], bodies.SGLangSampling
    elif path in ("/v1/completions", "/v1/chat/completions"):
        inside.update(draw.choice(BESIDE))
    names = [field.alias or name for name, field in model.model_fields.items()]
    name, value = draw.choice(names), draw.choice(EDGES)
    shape = draw.random()
    inside[name] = [value] if shape < 0.1 else {"1": value} if shape < 0.2 else value
    content = json.dumps(valid)
    if draw.random() < 0.5:
        content = content.replace("Infinity", "1e999")
    return Fuzz(f"{path} {name}={value!r:.40}", request(path, content.encode()), answered=True)


@dataclasses.dataclass(frozen=True)
class Honest:
    """An honest request.

    Attributes:
      body: Body of /v1/completions.
      outputs: Texts of its outputs without other requests.
      seconds: Median of its time beside the other honest requests alone, in seconds.
    """

    body: dict
    outputs: tuple[str, ...]
    seconds: float = float("inf")


def honest_bodies() -> list[dict]:
    """Returns one body per honest client: greedy and sampled, streamed and whole."""
    return [
        {
            "prompt": "abcdefgh"[i:] + "abcabcab",
            "max_tokens": 24 + 4 * i,
            "temperature": 0.8 if i % 2 else 0.0,
            "seed": i,
            "n": 1 + i % 3 if i % 4 < 2 else 1,
            "stream": i % 4 >= 2,
        }
        for i in range(NUM_HONEST)
    ]


class Client:
    """Sends requests on connections of their own."""

    def __init__(self, url: str):
        """Creates a client of the server at a URL."""
        place = urllib.parse.urlsplit(url)
        self._place = place.hostname, place.port

    async def send(self, content: bytes, pause_s: float | None = None) -> bytes:
        """Returns what the server answers until it closes the connection."""
        reader, writer = await asyncio.open_connection(*self._place)
        received = b""
        with contextlib.suppress(ConnectionError):
            try:
                writer.write(content)
                if pause_s is not None:
                    for _ in range(10):
                        await asyncio.sleep(pause_s)
                        received += await asyncio.wait_for(reader.read(1), PATIENCE_S)
                    return received
                while piece := await reader.read(2**16):
                    received += piece
            finally:
                writer.transport.abort()
        return received

    async def outputs(self, body: dict) -> tuple[str, ...]:
        """Returns the texts of the outputs of a completion."""
        answer = await asyncio.wait_for(self.send(request("/v1/completions", body)), PATIENCE_S)
        head, _, content = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            return (answer.decode(errors="replace"),)
        if not body["stream"]:
            return tuple(choice["text"] for choice in json.loads(content)["choices"])
        lines = re.findall(rb"data: ({.*})", content)
        return ("".join(json.loads(line)["choices"][0]["text"] for line in lines),)


@dataclasses.dataclass
class Findings:
    """What happened.

    Attributes:
      statuses: Number of fuzzed requests by kind and status; "-" is no answer.
      problems: One line per problem.
      seconds: Times of the honest answers, by client.
      late: For each answer that took more than twice its time without fuzzed requests and a second:
        its time, that time, and the fuzzed requests that were under way when it was due.
    """

    statuses: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)
    seconds: list[list[float]] = dataclasses.field(
        default_factory=lambda: [[] for _ in range(NUM_HONEST)]
    )
    late: list[str] = dataclasses.field(default_factory=list)


async def measure(client: Client, seconds: float) -> tuple[list[Honest], Findings]:
    """Returns the honest requests with their outputs alone and their times beside each other."""
    cases = [Honest(body, await client.outputs(body)) for body in honest_bodies()]
    findings, over = Findings(), asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await _repeat_all(client, cases, findings, over, {})
    medians = map(statistics.median, findings.seconds)
    timed = [dataclasses.replace(case, seconds=s) for case, s in zip(cases, medians, strict=True)]
    # A machine with other work is late by itself.
    for case, took in zip(timed, findings.seconds, strict=True):
        findings.late += [f"{s:.2f} s" for s in took if s > 2 * case.seconds + 1]
    return timed, findings


async def attack(
    client: Client, honest: list[Honest], every: list[Fuzz], at_a_time: int
) -> Findings:
    """Sends all fuzzed requests while each honest client repeats its request."""
    findings, free, over = Findings(), asyncio.Semaphore(at_a_time), asyncio.Event()
    under_way: dict[int, tuple[str, float]] = {}

    async def one(number: int, fuzz: Fuzz) -> None:
        async with free:
            under_way[number] = fuzz.name, time.perf_counter()
            answered = fuzz.answered or fuzz.pause_s is not None
            try:
                sending = client.send(fuzz.content, fuzz.pause_s)
                answer = await asyncio.wait_for(sending, PATIENCE_S if answered else LEAVE_S)
            except TimeoutError:
                if answered:
                    findings.problems.append(f"{fuzz.name}: no end within {PATIENCE_S:g} s")
                answer = b""
            finally:
                del under_way[number]
        status = answer[9:12].decode(errors="replace") or "-"
        findings.statuses[fuzz.name.split()[0], status] += 1
        if status[0] == "5" or (fuzz.answered and status == "-"):
            findings.problems.append(f"{fuzz.name}: status {status}")

    repeating = asyncio.create_task(_repeat_all(client, honest, findings, over, under_way))
    await asyncio.gather(*(one(number, fuzz) for number, fuzz in enumerate(every)))
    over.set()
    await repeating
    return findings


async def _repeat_all(
    client: Client,
    cases: list[Honest],
    findings: Findings,
    over: asyncio.Event,
    under_way: Mapping[int, tuple[str, float]],
) -> None:
    """Repeats the honest requests, each in a client of its own, until `over` is set."""

    async def repeat(index: int, case: Honest) -> None:
        while not over.is_set():
            begin, limit = time.perf_counter(), 2 * case.seconds + 1
            answer = asyncio.create_task(client.outputs(case.body))
            await asyncio.wait([answer], timeout=None if limit == float("inf") else limit)
            beside = [(name, time.perf_counter() - since) for name, since in under_way.values()]
            outputs = await answer
            took = time.perf_counter() - begin
            findings.seconds[index].append(took)
            if took > limit:
                slow = ", ".join(f"{name} ({since:.1f} s)" for name, since in beside)
                findings.late.append(f"{took:.2f} s, alone {case.seconds:.2f} s; beside {slow}")
            if outputs != case.outputs:
                findings.problems.append(f"{case.body}: {outputs}, alone {case.outputs}")

    await asyncio.gather(*(repeat(index, case) for index, case in enumerate(cases)))


def resident_mib(pid: int) -> float:
    """Returns the resident memory of a process, in MiB."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def fuzz(
    server: served.Server, count: int, seed: int, at_a_time: int, alone_s: float
) -> tuple[list[Honest], Findings, Findings]:
    """Runs the honest clients without, then beside `count` fuzzed requests.

    Returns:
      The honest requests, and the findings without and beside the fuzzed ones.
    """

    async def both() -> tuple[list[Honest], Findings, Findings]:
        client = Client(server.url)
        honest, quiet = await measure(client, alone_s)
        findings = await attack(client, honest, list(fuzzed(count, seed)), at_a_time)
        findings.problems += quiet.problems
        return honest, quiet, findings

    honest, quiet, findings = asyncio.run(both())
    if server.process.poll() is not None:
        findings.problems.append(f"the server ended with status {server.process.poll()}")
    if "Traceback" in (log := server.log.read_text()):
        findings.problems.append(log[log.index("Traceback") :][:3000])
    return honest, quiet, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at_a_time", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="the memory is read after each")
    parser.add_argument("--config", type=pathlib.Path, help="default: a small random target")
    given = parser.parse_args()
    text = given.config.read_text() if given.config else served.CONFIG
    with (
        tempfile.TemporaryDirectory() as directory,
        served.serving(pathlib.Path(directory), *OPTIONS, config_text=text) as server,
    ):
        fuzz(server, given.requests // 4, given.seed, given.at_a_time, 1.0)  # warms up
        before = resident_mib(server.process.pid)
        problems = []
        for number in range(given.rounds):
            seed, begin = given.seed + 1 + number, time.perf_counter()
            honest, quiet, findings = fuzz(server, given.requests, seed, given.at_a_time, ALONE_S)
            print(f"{given.requests} fuzzed requests in {time.perf_counter() - begin:.0f} s")
            report(honest, quiet, findings)
            after = resident_mib(server.process.pid)
            print(f"resident memory {before:.0f} -> {after:.0f} MiB", flush=True)
            problems += findings.problems
    print("\n".join(problems[:20]) or "no problems")
    sys.exit(bool(problems))


def report(honest: list[Honest], quiet: Findings, findings: Findings) -> None:
    """Prints what happened in a round."""
    for (kind, status), count in sorted(findings.statuses.items()):
        print(f"{kind:24} {status:4} {count}")
    for case, seconds in zip(honest, findings.seconds, strict=True):
        print(
            f"honest {case.seconds:.2f} s alone; beside: {len(seconds)} answers, median "
            f"{statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
        )
    for name, found in (("without", quiet), ("beside", findings)):
        total = sum(map(len, found.seconds))
        print(f"{total} honest answers {name}, {len(found.late)} later than 2 x alone + 1 s")
    print("\n".join(line[:600] for line in findings.late[:20]))


if __name__ == "__main__":
    main()
