"""Studies: each answers one question about costs by a table and a plot, with the roofline."""

from collections.abc import Callable, Iterator, Mapping

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure.studies import answers, calibration, load, verification
from dflash.measure.studies.result import Step
from dflash.measure.studies.result import StudyResult as StudyResult

# Each yields its steps with the results so far; the last result is complete.
STUDIES: Mapping[str, Callable[[BenchmarkRun], Iterator[Step]]] = {
    "verify": verification.verify,
    "load": load.load,
    "answers": answers.answers,
    "calibration": calibration.calibration,
}

DECODING = frozenset(("load", "calibration"))  # Studies that decode prompts.
