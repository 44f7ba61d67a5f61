"""The study of serving: throughput and latencies of a server over loopback, under several loads."""

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
from dflash.measure import bench as benches
from dflash.measure.load_client import Answer, Plan
from dflash.measure.plots import Line
from dflash.measure.studies.result import Step, StudyResult, doubted
from dflash.offline.job import Job
from dflash.runs.display import Display
from dflash.serving import server
from dflash.serving.tracks import Tracks

AT_A_TIME = (1, 2, 4, 8, 16, 32, 64)
RATES = (0.5, 0.8)  # of the requests per second that plain decoding has reached
_QUEUE = 4096  # nothing is to be refused


def serve(config: BenchmarkRun) -> Iterator[Step]:
    """Drives a server for each strategy: so many requests at a time, then arrivals at random.

    The rates are the same for all strategies: shares of the most that the baseline has answered.
    """
    if config.forced:
        raise errors.ConfigError(
            "study.name=serve: measures acceptance; leave out trace and acceptance"
        )
    bench = benches.prepare(config)
    yield Step("loading weights", 0)
    bench.load()
    if bench.workload.has_later_turns:
        bench.converse()
    closed = config.study.values or AT_A_TIME
    total, done = len(bench.jobs) * (len(closed) + len(RATES)), itertools.count(1)
    rows: list[dict] = []
    for name, job in bench.jobs.items():
        yield Step(f"compiling for {name}", len(rows) / total)
        with _serving(config, job) as url:
            bodies = _bodies(bench, job)
            _drive(Plan(url, bodies[:1] * 2, at_a_time=2))  # the first requests are slower
            for count in closed:
                yield Step(f"{name}, {count} at a time", len(rows) / total)
                sent = _enough(bodies, max(len(bodies), 2 * count))
                rows.append(_row(name, count, None, _drive(Plan(url, sent, at_a_time=count))))
                yield Step(f"{name}, {count} at a time, is over", next(done) / total, _result(rows))
            best = max(
                row["requests_per_second"] for row in rows if row["drafter"] == bench.baseline
            )
            for share in RATES:
                rate = share * best
                yield Step(f"{name}, {rate:.2g} requests/s", len(rows) / total)
                rows.append(_row(name, None, rate, _drive(Plan(url, bodies, rate=rate))))
                yield Step(
                    f"{name}, {rate:.2g} requests/s, is over", next(done) / total, _result(rows)
                )


def _serving(config: BenchmarkRun, job: Job):
    """A server of one strategy in the background; a context of its URL."""
    run = job.config
    decode = ServeDecode(
        **{f.name: getattr(run.decode, f.name) for f in dataclasses.fields(run.decode)}
    )
    given = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)} | {"decode": decode}
    served = ServeRun(**given, serve=ServeConfig(queue=_QUEUE, drain_s=0.0))
    return server.in_background(Tracks(job, served, Display.silent(), loaded=True))


def _bodies(bench: benches.Bench, job: Job) -> list[dict[str, Any]]:
    """A request for each item, as the config samples."""
    seed = bench.config.decode.seed
    return [
        {"prompt": list(item.prompt.ids), "max_tokens": item.max_new_tokens, "seed": seed}
        for item in bench.workload.items
    ]


def _enough(bodies: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """As many requests, from the beginning again where there are fewer."""
    return list(itertools.islice(itertools.cycle(bodies), count))


def _drive(plan: Plan) -> list[Answer]:
    """Carries a plan out in a process of its own.

    Raises:
      UserError: a request has failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "dflash.measure.load_client"],
        input=json.dumps(dataclasses.asdict(plan)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise errors.UserError(f"study.name=serve: the client has failed: {lines[-1]}")
    answers = [Answer(**one) for one in json.loads(done.stdout)]
    problem = next((one.error for one in answers if one.error), None)
    if problem is not None:
        raise errors.UserError(f"study.name=serve: a request has failed: {problem}")
    return answers


def _row(name: str, at_a_time: int | None, rate: float | None, answers: Sequence[Answer]) -> dict:
    """The figures of one load."""
    seconds = max(one.last for one in answers) - min(one.begin for one in answers)
    tokens = sum(one.tokens for one in answers)
    # The first token comes from the prompt's own pass, and each cycle has one of the target's own.
    cycles = sum(one.tokens - 1 - one.accepted for one in answers)
    first = [1e3 * (one.first - one.begin) for one in answers]
    each = [1e3 * (one.last - one.first) / (one.tokens - 1) for one in answers if one.tokens > 1]
    return doubted(
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
            "tau": (tokens - len(answers)) / cycles if cycles else None,
        },
        (),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else math.nan


def _result(rows: Sequence[dict]) -> StudyResult:
    """The rows so far, and a line of throughput for each drafter."""
    lines = []
    for name in dict.fromkeys(row["drafter"] for row in rows):
        some = [row for row in rows if row["drafter"] == name and row["at_a_time"]]
        places = [row["at_a_time"] for row in some]
        lines.append(Line(name, places, [row["tokens_per_second"] for row in some]))
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
            "at_a_time: the next request is sent when one ends; rate: arrivals at random, so many "
            "per second",
        ],
        narrow=(
            "drafter",
            "at_a_time",
            "rate",
            "tokens_per_second",
            "ttft_p50_ms",
            "tpot_p50_ms",
            "tau",
        ),
    )
