"""Study of recorded answers: τ of every strategy on the same answers, without decoding."""

import time
from collections.abc import Iterator, Mapping

from flax import nnx

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.inference.acceptance import AnswersTest
from dflash.inference.replay import Text
from dflash.measure import bench as benches
from dflash.measure.plots import Line
from dflash.measure.studies.result import Step, StudyResult, with_warnings
from dflash.text import jsonl


def answers(config: BenchmarkRun) -> Iterator[Step]:
    """Compares the τ of strategies, such as checkpoints of one training run."""
    texts = _read(config.study.answers)
    (_, plain), *drafting = benches.prepare_models(config).items()
    if not drafting:
        raise errors.ConfigError("strategies: study.name=answers needs at least one that drafts")
    target, rows = plain.target, []
    yield Step("loading weights", 0)
    plain.load_target()
    for number, (name, job) in enumerate(drafting):
        yield Step(f"scoring {name}", number / len(drafting))
        job.load_drafter()
        begin = time.perf_counter()
        scored = AnswersTest(target, job.drafter, {"answers": texts}, config.decode)
        tau = scored(nnx.state(job.drafter)).get("tau")
        row = {"strategy": name, "tau": tau, "seconds": time.perf_counter() - begin}
        rows.append(with_warnings(row, ()))
        yield Step(f"{name}, done", (number + 1) / len(drafting), _result(rows, len(texts)))


def _result(rows: list[Mapping], count: int) -> StudyResult:
    places = list(range(1, 1 + len(rows)))
    lines = [Line("τ", places, [row["tau"] or 1.0 for row in rows])]
    title = f"Mean acceptance length (τ) on {count} recorded answers"
    return StudyResult(title, rows, lines, "strategy, in the order of the table", "τ")


def _read(file: str | None) -> list[Text]:
    """Reads lines with `prompt_ids` and `output_ids`, such as those of outputs.jsonl."""
    if file is None:
        raise errors.ConfigError(
            "study.answers: required by study.name=answers: a file of lines with prompt_ids and "
            "output_ids, such as outputs.jsonl of dflash decode"
        )
    texts = []
    for place, parse in jsonl.entries(file):
        try:
            fields = parse()
            ids = (jsonl.check_ids(fields.get(key), key) for key in ("prompt_ids", "output_ids"))
            texts.append(Text(*ids))
        except errors.InputError as error:
            raise errors.InputError(f"{place}: {error}") from error
    if not texts:
        raise errors.InputError(f"{file}: no answers")
    return texts
