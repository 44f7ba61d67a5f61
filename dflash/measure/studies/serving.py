"""Study of serving: throughput and latencies of a server over loopback, under several loads."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.serve_schema import ServeConfig, ServeDecode, ServeRun
from dflash.inference.engine import Engine
from dflash.loading.job import Job
from dflash.measure import bench as benches
from dflash.measure.load_client import Answer, LoadPlan
from dflash.measure.plots import Line
from dflash.measure.studies.result import Step, StudyResult, with_warnings
from dflash.measure.workload import Item
from dflash.runs.display import Display
from dflash.serving import server
from dflash.serving.backend import Backend
from dflash.text.prompts import Prompt

AT_A_TIME = (1, 2, 4, 8, 16, 32, 64)
RATES = (0.5, 0.8)  # Fractions of the requests per second that plain decoding has reached.
_SHOWN = ("drafter", "at_a_time", "rate", "tokens_per_second", "ttft_p50_ms", "tpot_p50_ms", "tau")
_QUEUE = 4096  # Long enough that the server rejects no request.


def serve(config: BenchmarkRun) -> Iterator[Step]:
    """Measures a server of each strategy, with concurrent requests, then with random arrivals.

    The arrival rates are fractions of the baseline's best throughput, so all strategies get the
    same ones.
    """
    bench = benches.prepare(config)
    yield Step("loading weights", 0)
    bench.load()
    if bench.workload.has_later_turns:
        bench.decode_later_turns()
    closed, items = config.study.values or AT_A_TIME, bench.workload.items
    # Each load sends its requests in this order.
    warming = items[:1] * 2
    loads = [_enough(items, max(len(items), 2 * count)) for count in closed]
    everything = [*warming, *itertools.chain(*loads), *items * len(RATES)]
    total, rows = len(bench.jobs) * (len(closed) + len(RATES)), []

    def over(where: str) -> Step:
        return Step(f"{where}, done", len(rows) / total, _result(rows))

    for name, job in bench.jobs.items():
        yield Step(f"compiling for {name}", len(rows) / total)
        with _serving(bench, job, everything) as url:
            # The first requests are slower than all others.
            _drive(LoadPlan(url, _bodies(bench, warming), at_a_time=2))
            for count, sent in zip(closed, loads, strict=True):
                where = f"{name}, {count} at a time"
                yield Step(where, len(rows) / total)
                answers = _drive(LoadPlan(url, _bodies(bench, sent), at_a_time=count))
                rows.append(_row(name, count, None, answers))
                yield over(where)
            plain = [row for row in rows if row["drafter"] == bench.baseline]
            best = max(row["requests_per_second"] for row in plain)
            for rate in (share * best for share in RATES):
                where = f"{name}, {rate:.2g} requests/s"
                yield Step(where, len(rows) / total)
                rows.append(
                    _row(name, None, rate, _drive(LoadPlan(url, _bodies(bench, items), rate=rate)))
                )
                yield over(where)


@dataclasses.dataclass(frozen=True)
class _Scripted(Job):
    """Job whose engine forces acceptance lengths upon its requests, in order of arrival."""

    scripts: tuple[tuple[int, ...], ...] = ()

    def engine(self, prompts: Sequence[Prompt] = (), *, num_stop_ids: int = 0) -> Engine:
        """Builds the engine and sets its script; see `Job.engine`."""
        size = len(self.scripts), max(map(len, self.scripts))
        engine = benches.make_engine(self, script=size, num_stop_ids=num_stop_ids)
        engine.follow(self.scripts)
        return engine


def _serving(bench: benches.Bench, job: Job, sent: Sequence[Item]):
    """Returns a context manager that serves one strategy in the background; it yields the URL."""
    run = job.config
    values = vars(run) | {"decode": ServeDecode(**vars(run.decode))}
    served = ServeRun(**values, serve=ServeConfig(queue=_QUEUE, drain_s=0.0))
    if bench.workload.forced:
        longest = job.drafter.longest_path
        scripts = tuple(tuple(benches.script(item, longest)) for item in sent)
        job = _Scripted(**vars(job), scripts=scripts)
    return server.in_background(Backend(job, served, Display.silent(), loaded=True))


def _bodies(bench: benches.Bench, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the body of a request for each item.

    Requests with forced acceptance ignore stop tokens, since they commit any drafted token.
    """
    always = {"seed": bench.config.decode.seed}
    if bench.workload.forced:
        always["ignore_eos"] = True
    return [
        {"prompt": list(item.prompt.ids), "max_tokens": item.max_new_tokens, **always}
        for item in items
    ]


def _enough(items: Sequence[Item], count: int) -> list[Item]:
    """Returns `count` items, starting again from the first if there are fewer."""
    return list(itertools.islice(itertools.cycle(items), count))


def _drive(plan: LoadPlan) -> list[Answer]:
    """Carries out a plan in a process of its own; raises UserError if a request failed."""
    done = subprocess.run(
        [sys.executable, "-m", "dflash.measure.load_client"],
        input=json.dumps(dataclasses.asdict(plan)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise errors.UserError(f"study.name=serve: the client failed: {lines[-1]}")
    answers = [Answer(**values) for values in json.loads(done.stdout)]
    problem = next((answer.error for answer in answers if answer.error), None)
    if problem is not None:
        raise errors.UserError(f"study.name=serve: a request failed: {problem}")
    return answers


def _row(name: str, at_a_time: int | None, rate: float | None, answers: Sequence[Answer]) -> dict:
    """Computes the figures of one load."""
    seconds = max(answer.last for answer in answers) - min(answer.begin for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    cycles = sum(answer.cycles for answer in answers)
    first = [1e3 * (answer.first - answer.begin) for answer in answers]
    each = [
        1e3 * (answer.last - answer.first) / (answer.tokens - 1)
        for answer in answers
        if answer.tokens > 1
    ]
    return with_warnings(
        {
            "drafter": name,
            "at_a_time": at_a_time,
            "rate": rate,
            "requests": len(answers),
            "requests_per_second": len(answers) / seconds,
            "tokens_per_second": tokens / seconds,
            "ttft_p50_ms": _percentile(first, 50),
            "ttft_p99_ms": _percentile(first, 99),
            "tpot_p50_ms": _percentile(each, 50),
            "tpot_p99_ms": _percentile(each, 99),
            # Prefill returns the first token; without a drafter no cycles are counted.
            "tau": (tokens - len(answers)) / cycles if cycles else 1.0,
        },
        (),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else math.nan


def _result(rows: Sequence[dict]) -> StudyResult:
    """Returns the rows so far, with a line of throughput for each drafter."""
    lines = []
    for name in dict.fromkeys(row["drafter"] for row in rows):
        strategy_rows = [row for row in rows if row["drafter"] == name and row["at_a_time"]]
        places = [row["at_a_time"] for row in strategy_rows]
        lines.append(Line(name, places, [row["tokens_per_second"] for row in strategy_rows]))
    return StudyResult(
        "A server under load",
        list(rows),
        lines,
        "requests at a time",
        "tokens per second",
        log=True,
        notes=[
            "ttft: from sending a request to its first token; tpot: each further token; over "
            "loopback, from another process",
            "at_a_time: number of concurrent requests; rate: mean number of requests per second, "
            "sent at random times",
        ],
        narrow=_SHOWN,
    )
