"""Studies: each answers one question about costs by a table and a plot, with the roofline."""

from collections.abc import Callable, Iterator, Mapping

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure.studies import answers, calibration, load, timings
from dflash.measure.studies.result import Step
from dflash.measure.studies.result import StudyResult as StudyResult
from dflash.version import install_command


def _serve(config: BenchmarkRun) -> Iterator[Step]:
    """Measures a server, by packages that no other study needs; see `serving.serve`."""
    try:
        from dflash.measure.studies import serving
    except ModuleNotFoundError as error:
        raise errors.ConfigError(f"study.name=serve: {error}; {install_command('serve')}") from None
    return serving.serve(config)


# Each yields its steps with the results so far; the last result is complete.
STUDIES: Mapping[str, Callable[[BenchmarkRun], Iterator[Step]]] = {
    "cycle": timings.cycle,
    "verify": timings.verify,
    "draft": timings.draft,
    "load": load.load,
    "serve": _serve,
    "answers": answers.answers,
    "calibration": calibration.calibration,
}

DECODING = frozenset(("load", "serve", "calibration"))  # Studies that decode prompts.
