"""The output of a run: on a terminal, in a log, and in files."""

import io
import os

import pytest
from support import Terminal, read_lines

from dflash import errors
from dflash.training import report as report_lib
from dflash.training.report import TrainReport


def open_report(directory, stream, first_step=0):
    return TrainReport(
        directory, steps=100, first_step=first_step, tokens_per_step=50, stderr=stream
    )


def lines(directory):
    return read_lines(directory / "metrics.jsonl")


METRICS = {"loss": 2.5, "token_accuracy": 0.25, "grad_norm": 1.0, "learning_rate": 6e-4}


def test_the_loss_is_that_of_a_token():
    line = report_lib.describe({"loss": 846.83, "token_loss": 2.5, "learning_rate": 1e-3})
    assert line == "loss 2.5000 · lr 1.00e-03"


def test_a_log_file_gets_plain_lines(tmp_path):
    stream = io.StringIO()
    with open_report(tmp_path, stream) as report:
        report.start_clock(1)
        report.log(11, METRICS)
        report.evaluation(11, {"loss": 2.0, "tau": 3.5, "tau/math": 4.0}, 1.25)
        report.note("a remark")
    first, second, third = stream.getvalue().splitlines()
    assert first.startswith("step 11/100 · loss 2.5000 · lr 6.00e-04 · ")
    assert first.endswith(" left")
    assert "tokens/s" in first
    assert second == "step 11 · held out: loss 2.0000 · τ 3.50 · τ/math 4.00 · 1.2 s"
    assert third == "a remark"


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with open_report(tmp_path, stream) as report:
        report.start_clock(1)
        report.step(11)
        report.log(11, METRICS)
    text = stream.getvalue()
    assert "11/100" in text
    assert "loss 2.5000" in text
    assert "tokens/s" in text
    assert "\x1b[" in text


def test_metrics_are_written_as_json(tmp_path):
    with open_report(tmp_path, io.StringIO()) as report:
        report.start_clock(1)
        report.log(11, METRICS | {"loss": float("nan")})
        report.evaluation(11, {"tau": 3.5}, 1.25)
    train, evaluation = lines(tmp_path)
    assert train.pop("tokens_per_second") > 0
    assert train == {"kind": "train", "step": 11, **METRICS, "loss": None}
    assert evaluation == {"kind": "evaluation", "step": 11, "tau": 3.5, "seconds": 1.25}


def test_tensorboard_can_read_its_files(tmp_path):
    from tensorboardX.proto import event_pb2

    with open_report(tmp_path, io.StringIO()) as report:
        report.log(10, METRICS)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    content, found = file.read_bytes(), {}
    while content:
        size = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + size])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        content = content[16 + size :]
    assert found["train/loss"] == (10, 2.5)


def test_the_speed_leaves_pauses_out(tmp_path, monkeypatch):
    clock = iter([0.0, 10.0, 30.0, 31.0])
    monkeypatch.setattr(report_lib.time, "perf_counter", lambda: next(clock))
    with open_report(tmp_path, io.StringIO()) as report:
        report.start_clock(1)  # at 10 s
        report.pause(15.0)
        report.log(11, METRICS)  # at 30 s: 10 steps in 5 s
        report.log(12, METRICS)  # at 31 s
    speeds = [line["tokens_per_second"] for line in lines(tmp_path)]
    assert speeds == pytest.approx([10 * 50 / 5, 50])


def test_the_time_left_counts_evaluations(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 10.0, 20.0, 30.0])
    monkeypatch.setattr(report_lib.time, "perf_counter", lambda: next(clock))
    stream = io.StringIO()
    counts = {"steps": 25, "first_step": 0, "tokens_per_step": 50, "evaluate_every": 10}
    with TrainReport(tmp_path, stderr=stream, **counts) as report:
        report.start_clock(0)
        report.log(10, METRICS)  # 1 s a step, and three evaluations of unknown length
        report.evaluating(10)
        report.evaluation(10, {"loss": 2.0}, 60.0)
        report.log(20, METRICS)
        report.evaluation(20, {"loss": 2.0}, 100.0)
        report.log(25, METRICS)
        report.evaluation(25, {"loss": 2.0}, 100.0)
    told = stream.getvalue().splitlines()
    assert told[1] == "step 10 · evaluating"
    left = [line.rpartition(" · ")[2] for line in told if line.endswith("left")]
    assert left == ["0:00:15+ left", "0:02:05 left", "0:01:40 left"]


def test_a_continued_run_drops_lines_that_it_will_write_again(tmp_path):
    with open_report(tmp_path, io.StringIO()) as report:
        for step in (10, 20, 30):
            report.log(step, METRICS)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    open_report(tmp_path, io.StringIO(), first_step=20).close()
    assert [line["step"] for line in lines(tmp_path)] == [10, 20]


def test_a_full_disk_is_one_line(tmp_path):
    with open_report(tmp_path, io.StringIO()) as report:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, report._metrics._descriptor)
        os.close(full)
        with pytest.raises(
            errors.WorkdirError, match=r"metrics\.jsonl: cannot be written: No space left"
        ):
            report.log(10, METRICS)
