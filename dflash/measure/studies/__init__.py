"""Studies: one question about costs each, answered by a table, a plot, and the roofline beside."""

from collections.abc import Callable, Iterator, Mapping

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure.studies import serving, timings, variants
from dflash.measure.studies.result import Step
from dflash.measure.studies.result import StudyResult as StudyResult

# Each yields what it does, step by step, and what it has found by then; the last result is whole.
STUDIES: Mapping[str, Callable[[BenchmarkRun], Iterator[Step]]] = {
    "cycle": timings.cycle,
    "verify": timings.verify,
    "draft": timings.draft,
    "block": variants.block,
    "layers": variants.layers,
    "taps": variants.taps,
    "batch": variants.batch,
    "serve": serving.serve,
}

# Those that cut acceptance lengths to the block of each variant, and all that decode prompts.
CUTTING = frozenset(("block", "layers", "taps"))
DECODING = CUTTING | {"batch", "serve"}
