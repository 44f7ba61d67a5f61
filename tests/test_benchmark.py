"""The benchmark as a user runs it: a config in; figures, plots, a page and clear complaints out."""

import contextlib
import csv
import io
import itertools
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from support import write_lines
from support.models import BYTE_TARGET

from dflash import benchmark, sweep

CONFIG = f"""
target: {BYTE_TARGET}
drafter: {{name: dflash, checkpoint: random,
  architecture: {{num_hidden_layers: 1, block_size: 4, target_layer_ids: [0]}}}}
strategies: {{dflash: }}
tasks: [spec-bench]
raw_dir: raw
prompts_per_task: 2
rounds: 2
replay_tokens: 8
decode: {{max_new_tokens: 9, sync_every: 4, page_size: 16, prefill_chunk: 64}}
dtype: float32
"""
# Every turn, the answer before it included, takes 33 to 64 bytes: programs of one size do.
QUESTIONS = [
    {"turns": ["Which of the two is the larger?!", "A?"]},
    {"turns": ["What do one and two come to then?"], "reference": ["That is\n#### 3"]},
]
SWEEP = """
base: [c.yml]
sweep: {run: benchmark, product: {decode.batch_size: [1, 2]}}
"""
# Every token would end a sequence, did stop ids count where acceptance is forced.
SWEPT = [
    *("trace=trace.json", "rounds=1", "prompts_per_task=3", "replay_tokens=4"),
    "decode.max_new_tokens=24",
    f"decode.stop_ids={list(range(256))}",
]
LENGTHS = [[4, 1, 2, 4, 3], [1, 1, 4], [2, 2, 2, 2], [3, 3]]


def command(argv, directory: pathlib.Path, entry=benchmark, config="c.yml"):
    """Runs a command in a directory; returns its exit status, stdout and stderr."""
    directory.joinpath("c.yml").write_text(CONFIG)
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(directory),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as caught,
    ):
        entry.main([config, *argv])
    return caught.value.code, out.getvalue(), err.getvalue()


@pytest.fixture
def run(tmp_path):
    """Runs the command in a fresh directory; returns (exit status, stdout, stderr)."""
    return lambda *argv: command(argv, tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a whole run prints and writes; run once for all tests."""
    directory = tmp_path_factory.mktemp("measured")
    path = directory / "raw" / "spec_bench" / "question.jsonl"
    write_lines(path, QUESTIONS)
    others = "strategies.short.block_size=3", "strategies.chosen.block_size=auto"
    status, out, err = command([*others, "--workdir=out"], directory)
    assert status == 0, err
    return directory / "out", out


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep over forced benchmarks of two batch sizes, and what it printed."""
    directory = tmp_path_factory.mktemp("swept")
    write_trace(directory / "trace.json")
    (directory / "s.yml").write_text(SWEEP)
    status, out, err = command([*SWEPT, "--workdir=w"], directory, sweep, "s.yml")
    assert status == 0, err
    (directory / "stdout").write_text(out)
    (directory / "stderr").write_text(err)
    return directory


def write_trace(path: pathlib.Path, rows=None) -> None:
    rows = rows or [
        {"dataset": name, "prompt_tokens": 20, "acceptance_lengths": lengths}
        for name, lengths in zip(("gsm8k", "gsm8k", "alpaca", "gsm8k"), LENGTHS, strict=True)
    ]
    path.write_text(json.dumps(rows))


def page_data(path: pathlib.Path) -> dict:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(found[1])


def test_every_cell_is_measured(measured):
    directory, out = measured
    results = json.loads((directory / "results.json").read_text())
    assert results["complete"]
    assert results["schema"] == "dflash.benchmark/1"
    assert results["acceptance"]["source"] == "measured"
    cells = {cell["strategy"]: cell for cell in results["cells"]}
    assert set(cells) == {"none", "dflash", "short", "chosen"}
    assert cells["chosen"]["identical_share"] == 1.0
    assert cells["chosen"]["cost_ms"]["cycle"] > 0
    assert cells["chosen"]["cost_ms"]["draft"] is None
    for name, block_size in (("none", 1), ("dflash", 4), ("short", 3)):
        cell = cells[name]
        # Three prompts: a conversation of two turns, and one of one.
        assert (cell["rounds"], cell["prompts"], cell["block_size"]) == (2, 3, block_size)
        assert cell["identical_share"] == 1.0
        assert cell["output_tokens"] == 2 * 3 * 8
        # Random weights do not know that one and two are three.
        assert (cell["checked"], cell["correct_share"]) == (2, 0.0)
        cost = cell["cost_ms"]
        parts = cost["draft"] + cost["verify"] + cost["rest"]
        assert parts == pytest.approx(cost["cycle"], rel=0.02)
        assert (cost["draft"] > 0) == (block_size > 1)
        assert cost["verify"] > 0
        assert cell["tpot_ms"] == pytest.approx(cost["cycle"] / cell["tau"], rel=1e-6)
    with (directory / "results.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["strategy"] for row in rows] == ["none", "dflash", "short", "chosen"]
    assert float(rows[1]["speedup"]) == pytest.approx(cells["dflash"]["speedup"])
    assert {row["correct_share"] for row in rows} == {"0.0"}
    for name in ("speedup", "acceptance", "cost"):
        assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "dflash" in out
    # The table and all sentences fit on a terminal.
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[0].split() == ["task", "strategy", "τ", "speed-up", "(95", "%)", "same"]


def test_figures_that_cannot_be_trusted_are_marked(measured):
    """Two conversations are too few, whatever they took."""
    directory, out = measured
    results = json.loads((directory / "results.json").read_text())
    words = "2 prompts (or conversations): an interval needs 6 or more; raise prompts_per_task"
    for cell in results["cells"]:
        assert {"about": "speedup", "words": words} in cell["doubts"]
    assert f"not trustworthy (?), speed-up of every cell: {words}" in " ".join(out.split())
    assert "largest loss" not in out
    assert results["machine"]["flops_per_s"] > 0
    assert 0 <= results["load"]["others_share"] <= 1
    with (directory / "results.csv").open() as lines:
        assert all(words in row["doubts"] for row in csv.DictReader(lines))
    assert page_data(directory / "report.html")["results"]["cells"] == results["cells"]


def test_the_page_replays_what_every_strategy_wrote(measured):
    directory, _ = measured
    lanes = page_data(directory / "report.html")["replays"]["spec-bench"]["strategies"]
    assert set(lanes) == {"none", "dflash", "short"}
    for name in lanes:
        committed = 1 + sum(frame["tokens"] for frame in lanes[name]["frames"])
        assert committed == 8
        text = lanes[name]["first"] + "".join(
            "".join(frame["accepted"]) + frame["bonus"] for frame in lanes[name]["frames"]
        )
        assert text == lanes["none"]["first"] + "".join(
            frame["bonus"] for frame in lanes["none"]["frames"]
        )
    assert all(len(frame["rejected"]) <= 3 for frame in lanes["dflash"]["frames"])


def test_files_of_prompts_at_several_temperatures(run, tmp_path):
    for folder, texts in (("a", ["one", "two", "three"]), ("b", ["four"])):
        write_lines(tmp_path / folder / "mine.jsonl", [{"prompt": text} for text in texts])
    tasks = "tasks=[a/mine.jsonl, b/mine.jsonl]"
    status, _, err = run(tasks, "temperatures=[0, 0.8]", "rounds=1", "--workdir=out")
    assert status == 0, err
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "results.csv").read_text())))
    expected = [
        (f"{name}@{temperature}", strategy, float(temperature), prompts)
        for name, prompts in (("mine", "2"), ("mine-2", "1"))
        for temperature in ("0", "0.8")
        for strategy in ("none", "dflash")
    ]
    keys = "task", "strategy", "temperature", "prompts"
    shown = [(row[keys[0]], row[keys[1]], float(row[keys[2]]), row[keys[3]]) for row in rows]
    assert shown == expected, "prompts_per_task is 2"
    assert all(row["identical_share"] == "1.0" for row in rows)


def test_a_trace_decides_acceptance_and_every_output_says_so(swept):
    """Three prompts in two slots: each follows its own script, whichever slot it gets."""
    point = swept / "w/points/decode.batch_size=2"
    results = json.loads((point / "results.json").read_text())
    assert results["batch_size"] == 2
    assert results["acceptance"]["source"] == "trace"
    assert results["acceptance"]["file"] == "trace.json"
    assert "forced" in results["acceptance"]["words"]
    assert "forced" in (swept / "stdout").read_text()
    cells = {(cell["task"], cell["strategy"]): cell for cell in results["cells"]}
    alpaca, gsm8k = cells["alpaca", "dflash"], cells["gsm8k", "dflash"]
    assert alpaca["acceptance_histogram"] == {"1": 0, "2": 4, "3": 0, "4": 0}
    assert gsm8k["acceptance_histogram"] == {"1": 3, "2": 1, "3": 3, "4": 3}
    assert (gsm8k["prompts"], gsm8k["groups"]) == (3, 3)
    assert 1 < gsm8k["busy_slots"] <= 2
    assert alpaca["tau"] == 2.0
    assert cells["alpaca", "none"]["output_tokens"] == alpaca["output_tokens"] == 8
    assert alpaca["identical_share"] is None
    with (point / "results.csv").open() as lines:
        assert {row["acceptance"] for row in csv.DictReader(lines)} == {"trace"}
    assert page_data(point / "report.html")["results"]["acceptance"]["source"] == "trace"


def test_a_sweep_has_the_figures_of_every_cell_and_runs_each_point_once(swept):
    with (swept / "w/sweep.csv").open(newline="") as lines:
        rows = {row["name"]: row for row in csv.DictReader(lines)}
    assert len(rows) == 2
    for name, row in rows.items():
        with (swept / "w/points" / name / "results.csv").open() as lines:
            cells = {(line["task"], line["strategy"]): line for line in csv.DictReader(lines)}
        for task, figure in itertools.product(("alpaca", "gsm8k"), ("tau", "speedup", "draft_ms")):
            assert row[f"{task}.dflash.{figure}"] == cells[task, "dflash"][figure]
        assert float(row["alpaca.dflash.tau"]) == 2.0
        assert "alpaca.none.tau" not in row
    # However narrow the terminal, no name is cut: lines break instead.
    shown = (swept / "stderr").read_text()
    assert "gsm8k.dflash.speedup" in "".join(shown.split())
    assert "…" not in shown.rpartition("\n\n")[2]
    before = (swept / "w/sweep.csv").read_text()
    status, out, err = command([*SWEPT, "--workdir=w"], swept, sweep, "s.yml")
    assert (status, out) == (0, "")
    assert "2 of 2 points are already finished" in err
    assert (swept / "w/sweep.csv").read_text() == before


def test_a_sweep_runs_no_studies(tmp_path):
    (tmp_path / "s.yml").write_text(SWEEP)
    status, _, err = command(["study.name=verify", "--workdir=w"], tmp_path, sweep, "s.yml")
    assert status == 2
    assert err == "error: study: sweeps do not run studies; use dflash benchmark for this one\n"
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("study", "options", "rows", "keys"),
    [
        ("verify", ["study.values=[1, 4]", "study.contexts=[16, 64]"], 4, "rows over_roofline"),
        ("load", ["study.values=[1]", "drafter.block_size=16"], 2, "task tau over_fixed"),
    ],
)
def test_a_study_makes_a_table_and_a_plot(run, tmp_path, study, options, rows, keys):
    always = ["study.repeats=1", "rounds=1", "prompts_per_task=1", "prompt_tokens=8"]
    always += ["--acceptance=alpaca", "drafter.architecture.block_size=16"]
    always += ["decode.sync_every=2", "drafter.block_size=4"]
    status, out, err = run(f"study.name={study}", *always, *options, "--workdir=out")
    assert status == 0, err
    values = json.loads((tmp_path / "out/study.json").read_text())
    assert (values["schema"], values["study"]) == ("dflash.study/1", study)
    assert values["complete"]
    # Where nothing is decoded, what is accepted plays no part.
    assert ("forced" in out) == (study != "verify")
    assert max(map(len, out.splitlines())) <= 80
    assert len(values["rows"]) == rows
    assert set(keys.split()) <= set(values["rows"][0])
    assert any("roofline" in note for note in values["notes"])
    assert values["acceptance"]["source"] == "published"
    assert (tmp_path / "out/study.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "out/study.csv").read_text().splitlines()) == 1 + rows
    assert "roofline" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tasks=[]"], "tasks: required: a list of data sets or files, such as [math, mine.jsonl]"),
        (["strategies.dfl.name=dflsh"], "unknown name 'dflsh'; did you mean 'dflash'?"),
        (["strategies.short.block_size=5"], "5 exceeds strategies.short.architecture.block_size=4"),
        (["strategies.none.name=dflash"], "strategies.none: this is the name of the baseline"),
        (["--trace=gone.json"], "gone.json: cannot be read: No such file or directory"),
        (["--trace=t.json", "strategies.short.block_size=3"], "t.json: prompt 0 (gsm8k): commits 4 "
         "tokens in a cycle, but strategy 'short' has a block of 3"),
        (["--trace=t.json", "trace_tasks=[gsm]"], "has no 'gsm'; did you mean 'gsm8k'?"),
        (["--trace=t.json", "decode.num_pages=40"],
         "decode.num_pages: a preempted sequence would lose its forced acceptance lengths; leave "
         "it unset"),
        (["--acceptance=math50"], "nothing published on 'math50'; did you mean 'math500'?"),
        (["--acceptance=alpaca", "--trace=t.json"], "trace: excludes acceptance"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(run, tmp_path, argv, message):
    write_trace(tmp_path / "t.json")
    status, _, err = run(*argv)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--trace=t.json"], "t.json: prompt 0 (gsm8k): commits 4 tokens in a cycle, but strategy"),
        (["--trace=t.json", "study.name=load"], "t.json: prompt 0 (gsm8k): commits 4 tokens"),
        (["--acceptance=alpaca", "prompt_tokens=16777216"], "acceptance=alpaca: 16777216"),
        (["--acceptance=alpaca", "decode.max_new_tokens=16777216"],
         "the target was made for 256 positions"),
    ],
)  # fmt: skip
def test_a_dry_run_finds_what_is_wrong_with_given_lengths(run, tmp_path, argv, message):
    write_trace(tmp_path / "t.json")
    status, _, err = run(*argv, "strategies.short.block_size=3", "--dry_run")
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_dry_run_plans_for_prompts_as_long_as_recorded(run, tmp_path):
    write_trace(tmp_path / "t.json")
    status, out, err = run("--trace=t.json", "--dry_run")
    assert status == 0, err
    assert out.count("prefill 32") == 2
    # A study of forwards alone reads no recording.
    assert run("trace=gone.json", "study.name=verify", "--dry_run")[0] == 0


def test_an_interrupted_run_leaves_the_rounds_that_are_done(tmp_path):
    (tmp_path / "c.yml").write_text(CONFIG)
    write_trace(tmp_path / "t.json")
    options = ["--trace", "t.json", "rounds=100000", "--workdir=out"]
    command = [sys.executable, "-m", "dflash.benchmark", "c.yml", *options]
    done = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    path = tmp_path / "out/results.json"
    deadline = time.monotonic() + 300
    while not path.exists() and time.monotonic() < deadline and done.poll() is None:
        time.sleep(0.1)
    done.send_signal(signal.SIGINT)
    _, err = done.communicate(timeout=300)
    assert done.returncode == 130, err
    results = json.loads(path.read_text())
    assert not results["complete"]
    assert {cell["strategy"] for cell in results["cells"]} == {"none", "dflash"}
    assert all(cell["rounds"] >= 1 for cell in results["cells"])


@pytest.mark.parametrize(
    ("argv", "overrides"),
    [
        (["--trace", "t.json"], ["trace=t.json"]),
        (["--acceptance=a,b"], ["acceptance=[a,b]"]),
        (["--acceptance=a", "--trace=t"], ["trace=t", "acceptance=[a]"]),
        (["--dry_run"], []),
    ],
)
def test_short_flags_become_overrides(argv, overrides):
    values = benchmark.SUBCOMMAND.flag_values()
    values(["dflash", *argv])
    assert benchmark.SUBCOMMAND.overrides(values) == overrides
