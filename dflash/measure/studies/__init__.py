"""Studies: each answers one question about costs by a table and a plot, with the roofline."""

from collections.abc import Callable, Iterator, Mapping

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure.studies import load, serving, timings
from dflash.measure.studies.result import Step
from dflash.measure.studies.result import StudyResult as StudyResult

# Each yields its steps with the results so far; the last result is complete.
STUDIES: Mapping[str, Callable[[BenchmarkRun], Iterator[Step]]] = {
    "cycle": timings.cycle,
    "verify": timings.verify,
    "draft": timings.draft,
    "load": load.load,
    "serve": serving.serve,
}

DECODING = frozenset(("load", "serve"))  # Studies that decode prompts.
