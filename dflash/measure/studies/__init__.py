"""Studies: each answers one question about costs by a table and a plot, with the roofline."""

from collections.abc import Callable, Iterator, Mapping

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure.studies import serving, survival, throughput, timings, trees, variants
from dflash.measure.studies.result import Step
from dflash.measure.studies.result import StudyResult as StudyResult

# Each yields its steps with the results so far; the last result is complete.
STUDIES: Mapping[str, Callable[[BenchmarkRun], Iterator[Step]]] = {
    "cycle": timings.cycle,
    "verify": timings.verify,
    "draft": timings.draft,
    "block": variants.block,
    "layers": variants.layers,
    "taps": variants.taps,
    "batch": variants.batch,
    "load": throughput.load,
    "serve": serving.serve,
    "survival": survival.survival,
    "trees": trees.trees,
}

# Studies that cut acceptance lengths to the block of each variant, and all that decode prompts.
CUTTING = frozenset(("block", "layers", "taps"))
DECODING = CUTTING | {"batch", "load", "serve", "survival", "trees"}
