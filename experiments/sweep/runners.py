"""Runs of a sweep's points: decoding, and benchmarks."""

import datetime
import io
import pathlib
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.schema import DecodeRun
from dflash.loading import job as jobs
from dflash.loading.job import Job
from dflash.measure import bench as benches
from dflash.measure import benchmark_run, results
from dflash.models.decoder import Decoder
from dflash.offline import decode_run
from dflash.offline.decode_run import Weights
from dflash.runs import dates
from dflash.runs.display import Display
from experiments.sweep.runs import Runner


class DecodePoints(Runner):
    """Runner that decodes at each point; its directory is a work directory of `dflash.decode`."""

    metrics = (
        "tau",
        "tokens_per_second",
        "speed_up",
        "ttft_ms",
        "tpot_ms",
        "cycles",
        "prompts",
        "output_tokens",
        "decode_seconds",
    )
    shown = ("tau", "tokens_per_second", "speed_up")

    def __init__(self, display: Display):
        super().__init__(display)
        self._weights = Weights(display)
        self._checked: dict[str, Job] = {}

    def check(self, config: DecodeRun) -> None:
        self._checked[loader.config_hash(config)] = _prepare(config, datetime.date.today())

    def affinity(self, config: DecodeRun) -> str:
        return jobs.target_key(config)

    def run(self, config: DecodeRun, directory: pathlib.Path) -> Mapping[str, Any]:
        date = dates.find(directory)
        job = self._checked.pop(loader.config_hash(config), None)
        if job is None or job.date != date:  # The point was started on another day.
            job = _prepare(config, date)
        with decode_run.open_records(directory, config, date) as records:
            results = decode_run.run(job, records, Display.silent(), load=self._weights)
        return results | {"speed_up": results.get("baseline", {}).get("speed_up")}


def _prepare(config: DecodeRun, date: datetime.date) -> Job:
    named = config.prompts
    if not named.text and named.file is None and named.dataset is None:
        raise errors.ConfigError(
            "prompts: required: text, file or dataset; a sweep reads no prompts from stdin"
        )
    return jobs.prepare(config, stdin=io.StringIO(), date=date)


class BenchmarkPoints(Runner):
    """Runner of sweep points that are benchmarks; each point has a work directory of its own."""

    metrics = results.FIGURES
    shown = ("tau", "speedup")

    def __init__(self, display: Display):
        super().__init__(display)
        self._targets: dict[str, Decoder] = {}  # At most one, by `jobs.target_key`.

    def check(self, config: BenchmarkRun) -> None:
        if config.study is not None:
            raise errors.ConfigError(
                "study: sweeps do not run studies; use dflash benchmark for this one"
            )
        benches.prepare(config)

    def affinity(self, config: BenchmarkRun) -> str:
        return jobs.target_key(config.decode_run(benches.BASELINE))

    def run(self, config: BenchmarkRun, directory: pathlib.Path) -> Mapping[str, Any]:
        key = self.affinity(config)
        # Free another target first: memory may not hold two.
        self._targets = {other: target for other, target in self._targets.items() if other == key}
        bench = benches.prepare(config, target=self._targets.get(key))
        with results.open_directory(directory, config) as opened:
            values = benchmark_run.measure(bench, opened, Display.silent())
        self._targets[key] = bench.target
        return {
            f"{row['task']}.{row['strategy']}.{name}": row[name]
            for row in results.rows(values)
            if row["strategy"] != bench.baseline
            for name in self.metrics
        }
