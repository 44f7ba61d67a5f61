"""Sweeps over benchmarks; the target stays loaded as long as consecutive points share it."""

import pathlib
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.loading import job
from dflash.measure import bench as benches
from dflash.measure import benchmark_run, results
from dflash.models.decoder import Decoder
from dflash.runs.display import Display
from dflash.runs.sweeps import Runner


class BenchmarkPoints(Runner):
    """Runner of sweep points that are benchmarks; each point has a work directory of its own."""

    metrics = results.FIGURES
    shown = ("tau", "speedup")

    def __init__(self, display: Display):
        super().__init__(display)
        self._targets: dict[str, Decoder] = {}  # At most one, by `job.target_key`.

    def check(self, config: BenchmarkRun) -> None:
        if config.study is not None:
            raise errors.ConfigError(
                "study: sweeps do not run studies; use dflash benchmark for this one"
            )
        benches.prepare(config)

    def affinity(self, config: BenchmarkRun) -> str:
        return job.target_key(config.decode_run(benches.BASELINE))

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
