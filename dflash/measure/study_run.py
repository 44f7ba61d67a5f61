"""Runs of studies: measurements, files and printed figures."""

import dataclasses
from typing import Any

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure import results, studies, table, warnings, workload
from dflash.measure.load import Load, LoadMeter
from dflash.runs.directory import RunDirectory
from dflash.runs.display import Display


def run(
    config: BenchmarkRun, directory: RunDirectory, display: Display, *, wide: bool = False
) -> dict[str, Any]:
    """Runs the config's study and writes study.json, study.csv and study.png.

    Results so far are saved after each turn.

    Returns:
      The content of study.json.
    """
    name, meter, answer = config.study.name, LoadMeter(), None
    with display.progress(f"study {name}") as progress:
        for step in studies.STUDIES[name](config):
            progress(step.what, step.done)
            if step.result is not None:
                answer = step.result
                values = _content(config, answer, meter.read())
                directory.write_json(results.STUDY, values | {"complete": False})
    load = meter.read()
    values = _content(config, answer, load) | {"complete": True}
    directory.write_json(results.STUDY, values)
    directory.write("study.csv", results.table_csv(answer.rows))
    # Studies of single forwards decode nothing, so acceptance lengths do not affect them.
    decodes = name in studies.DECODING
    directory.write("study.png", answer.png(workload.forced_note(config) if decodes else ""))
    notes = [f"not trustworthy: {warning.words}" for warning in warnings.of_load(load.others_share)]
    if decodes:
        notes.append(workload.acceptance_source(config)["words"])
    table.show(answer.text(wide=wide), notes)
    return values


def _content(config: BenchmarkRun, answer: studies.StudyResult, load: Load) -> dict[str, Any]:
    return {
        "schema": results.STUDY_SCHEMA,
        "study": config.study.name,
        "title": answer.title,
        "notes": list(answer.notes),
        warnings.KEY: [
            dataclasses.asdict(warning) for warning in warnings.of_load(load.others_share)
        ],
        "load": dataclasses.asdict(load),
        "acceptance": workload.acceptance_source(config),
        **results.common_facts(config),
        "rows": [dict(row) for row in answer.rows],
    }
