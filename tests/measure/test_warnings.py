"""Figures that cannot be true are marked wherever they are shown, and nothing follows from them."""

import csv
import dataclasses
import io
import json

import pytest
from support.made_samples import task_round

from dflash.measure import cells, plots, results, table, warnings
from dflash.measure.plots import Line
from dflash.measure.studies import result as studies
from dflash.measure.warnings import COST, EVERYTHING, SPEEDUP, FigureWarning
from dflash.runs import processor_load

BLOCKS = {"none": 1, "dflash": 4}
LENGTHS = [[4, 2, 4, 2], [3, 3, 3, 3]] * 3


def cell(*, cycle_ms=6.0, parts=(1.0, 4.0), pairs=3, outputs_differ=False, **options):
    plain = [[1] * 12] * 2 * pairs
    cycles = {"none": (plain, 3.0), "dflash": (LENGTHS[: 2 * pairs], cycle_ms)}
    done = task_round("math", 0, cycles, {"none": (0.0, 2.5), "dflash": parts})
    if outputs_differ:
        last = done.samples[-1]
        other = dataclasses.replace(last.completions[0], output_ids=(7,) * 13)
        changed = dataclasses.replace(last, completions=(other,))
        done = dataclasses.replace(done, samples=(*done.samples[:-1], changed))
    setting = cells.Setting("none", BLOCKS, BLOCKS, **options)
    return {one.strategy: one for one in cells.cells([done], setting)}["dflash"]


TRUSTED = cell()
CASES = {  # Words of a warning -> the cell that has it, and the figures that it is about.
    "the parts of a cycle took 5 ms, but the whole cycle only 4.9 ms": (cell(cycle_ms=4.9), COST),
    "the speed-up is 106 % of the ideal one": (cell(cycle_ms=4.7), COST),
    "verification took 4 ms, less than the 4.5 ms of the roofline":
        (cell(least_ms=lambda name, context: 4.5), COST),
    "2 prompts (or conversations): an interval needs 6 or more; raise prompts_per_task":
        (cell(pairs=1), SPEEDUP),
    "17 % of the outputs differ from those of plain decoding; none may":
        (cell(outputs_differ=True, exact=True), SPEEDUP),
    "1.0 of 8 slots were in use on average; raise prompts_per_task": (cell(slots=8), SPEEDUP),
    "other processes took 43 % of the processor during the run":
        (cell(warnings=warnings.of_load(0.43)), EVERYTHING),
}  # fmt: skip


def test_what_may_well_be_true_is_not_with_warnings():
    assert TRUSTED.warnings == ()
    assert table.warning_lines([TRUSTED]) == []
    assert table.limits([TRUSTED]) != []
    within = cell(least_ms=lambda name, context: 4.1, exact=True)
    assert within.warnings == warnings.of_load(0.05) == warnings.of_load(None) == ()
    assert cell(cycle_ms=4.96).warnings == ()  # its parts took 5 ms, timed apart
    # In bfloat16 outputs may differ.
    assert cell(outputs_differ=True).warnings == ()


@pytest.mark.parametrize("words", CASES)
def test_a_warning_is_shown_everywhere_and_nothing_is_concluded(words):
    found, about = CASES[words]
    assert FigureWarning(about, words) in found.warnings
    assert table.limits([found]) == []
    assert any(line.endswith(f": {words}") for line in table.warning_lines([found]))
    # The terminal marks the figures that it is about, and no others.
    shown = table.lines([found], [], wide=True)[1].split()
    assert shown[6].endswith("?") == (about != COST)
    assert shown[-1].endswith("?") == (about != SPEEDUP)
    assert ("?" in table.lines([found], [])[1]) == (about != COST)
    # JSON and CSV.
    facts = {"acceptance": {"source": "measured"}}
    values = json.loads(json.dumps(results.as_values([found], [], facts, complete=True)))
    assert {"about": about, "words": words} in values["cells"][0]["doubts"]
    (row,) = csv.DictReader(io.StringIO(results.table_csv(results.rows(values))))
    assert words in row["doubts"]
    # Plots look other than those of the same figures without a warning.
    believed = dataclasses.replace(found, warnings=())
    drawn = [plots.speedups([one], "none") + plots.costs([one]) for one in (found, believed)]
    assert drawn[0] != drawn[1]


def test_a_warning_line_names_the_cells_that_it_is_about():
    one = FigureWarning(SPEEDUP, "why")
    some = [
        dataclasses.replace(TRUSTED, task=task, strategy=strategy, warnings=(one,))
        for task in ("math", "code")
        for strategy in ("none", "x")
    ]
    assert table.warning_lines(some) == ["not trustworthy (?), speed-up of every cell: why"]
    some[2] = dataclasses.replace(some[2], warnings=())
    assert table.warning_lines(some) == ["not trustworthy (?), speed-up of math, code (x): why"]


def test_a_mean_has_the_warnings_of_its_tasks():
    trusted, flagged = (
        [task_round(task, 0, {"none": ([[1] * 12] * count, 3.0), "dflash": (LENGTHS[:count], 6.0)},
                    {"none": (0.0, 2.5), "dflash": (1.0, 4.0)})]
        for task, count in (("math", 6), ("code", 2))
    )  # fmt: skip
    done = trusted + flagged
    found = cells.cells(done, cells.Setting("none", BLOCKS, BLOCKS))
    average = cells.averages(found, done, baseline="none")[1]
    assert warnings.concern(average.warnings, SPEEDUP)
    assert not warnings.concern(average.warnings, COST)
    assert "1.50?" in table.lines([], [average])[1]


def test_a_study_marks_its_rows():
    fine = studies.with_warnings({"rows": 1, "context": 64, "verify_ms": 2.0}, ())
    wrong = studies.with_warnings(
        {"rows": 2, "context": 64, "verify_ms": 1.0}, warnings.of_forward("verification", 1.0, 2.0)
    )
    line = Line("verify", (1, 2), (2.0, 1.0), flagged=(False, True))
    found = studies.StudyResult("Cost", [fine, wrong], [line], "rows", "ms")
    text = found.text()
    assert [line.endswith("?") for line in text[2:5]] == [False, False, True]
    words = "verification took 1 ms, less than the 2 ms of the roofline"
    assert f"not trustworthy (?), rows 2, context 64: {words}" in " ".join(
        " ".join(text[5:]).split()
    )
    trusted = dataclasses.replace(found, lines=[dataclasses.replace(line, flagged=None)])
    assert found.png() != trusted.png()


@pytest.mark.parametrize(
    ("after", "share"),
    [
        # 100 s of four cores: 30 of them busy, 10 by this process.
        ("cpu  1000 0 1500 7000 0 0 0 500 0 0", 0.2),
        ("cpu  1000 0 0 9000 0 0 0 0 0 0", 0.0),
    ],
)
def test_the_load_is_what_others_took(tmp_path, monkeypatch, after, share):
    stat = tmp_path / "stat"
    monkeypatch.setattr(processor_load, "_STAT", stat)
    monkeypatch.setattr(processor_load.os, "sysconf", lambda name: 100)
    own = iter([(1.0, 1.0, 0.0, 0.0, 9.0), (8.0, 3.0, 0.5, 0.5, 99.0)])
    monkeypatch.setattr(processor_load.os, "times", lambda: next(own))
    stat.write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 1 2\n")
    meter = processor_load.LoadMeter()
    stat.write_text(f"{after}\n")
    assert meter.read().others_share == pytest.approx(share)
