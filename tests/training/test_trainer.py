"""The loop on a toy model: it learns, ends, stops, continues, and loses nothing."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support import SUPPORT, TESTS, free_port, read_lines, toy

from dflash.training import trainer as trainer_lib
from dflash.training.trainer import StopSignal

STEPS, EVERY = 12, 3
PAUSE_S = 0.05
MEASURE = {"goal": "tau", "evaluation": "12 prompts"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The final state of a run that nothing disturbed."""
    run = toy.Run(tmp_path_factory.mktemp("whole"), steps=STEPS, checkpoint_every=EVERY)
    return toy.arrays(run.go())


def start(directory: pathlib.Path, pause_s: float = 0.0, *processes: str) -> subprocess.Popen:
    """Starts toy_run.py; `processes` are the arguments of a run of several, a device each."""
    paths = [TESTS, TESTS.parent, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    if processes:
        environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"
    arguments = directory, STEPS, EVERY, pause_s, *processes
    return subprocess.Popen(
        [sys.executable, SUPPORT / "toy_run.py", *map(str, arguments)], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def final(directory: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(directory / "final.npz") as arrays:
        return dict(arrays)


def wait_for(condition, process, seconds: float = 300) -> None:
    """Waits until `condition` holds; the process must live until then."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def saved_steps(directory: pathlib.Path) -> list[int]:
    names = [path.name for path in (directory / "checkpoints").glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def metrics(directory: pathlib.Path) -> list[dict]:
    return read_lines(directory / "metrics.jsonl")


def test_the_toy_learns(tmp_path):
    run = toy.Run(tmp_path, steps=24)
    run.go()
    losses = [line["loss"] for line in metrics(tmp_path) if line["kind"] == "train"]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("first_leg", [1, 3, 7])
def test_a_run_in_legs_equals_one_run(uninterrupted, tmp_path, first_leg):
    toy.Run(tmp_path, steps=first_leg, checkpoint_every=EVERY).go()
    second = toy.Run(tmp_path, steps=STEPS, checkpoint_every=EVERY)
    outcome = second.go()
    assert second.started_at == first_leg
    toy.assert_identical(toy.arrays(outcome), uninterrupted)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_very_step(uninterrupted, tmp_path, number, status):
    process = start(tmp_path, PAUSE_S)
    wait_for(lambda: saved_steps(tmp_path), process)
    process.send_signal(number)
    (tmp_path / "go").touch()
    _, stderr = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in stderr) == (status, False), stderr
    rest = toy.Run(tmp_path, steps=STEPS, checkpoint_every=EVERY)
    toy.assert_identical(toy.arrays(rest.go()), uninterrupted)
    assert 0 < rest.started_at < STEPS


@pytest.mark.parametrize("poisoned", [1, 2, 8, STEPS])
def test_a_loss_that_is_not_finite_stops_the_run(uninterrupted, tmp_path, poisoned):
    run = toy.Run(tmp_path, steps=STEPS, checkpoint_every=EVERY, poison_at=poisoned)
    with pytest.raises(trainer_lib.TrainingError, match=f"^step {poisoned}: loss is nan") as caught:
        run.go()
    kept = (poisoned - 1) // EVERY * EVERY
    left = f"is that of step {kept}" if kept else "there is no earlier checkpoint"
    assert left in str(caught.value)
    # What was kept is good: with good data, the run ends as an undisturbed one.
    rest = toy.Run(tmp_path, steps=STEPS, checkpoint_every=EVERY)
    toy.assert_identical(toy.arrays(rest.go()), uninterrupted)
    assert rest.started_at == kept


def test_evaluations_decide_what_is_best(tmp_path):
    run = toy.Run(tmp_path, evaluate_every=2, scores=(1.0, 3.0, 2.0, 2.5, 1.0, 2.0))
    outcome = run.go()
    assert outcome.best == {**MEASURE, "step": 4, "score": 3.0}
    assert run.exported == [2, 4]
    assert run.kept == [4, 10, 12]


def test_what_was_best_is_known_after_a_restart(tmp_path):
    toy.Run(tmp_path, steps=8, evaluate_every=4, scores=(3.0, 2.0)).go()
    run = toy.Run(tmp_path, steps=12, evaluate_every=4, scores=(2.5,))
    assert run.go().best == {**MEASURE, "step": 4, "score": 3.0}
    assert run.exported == []
    assert run.kept == [4, 8, 12]


@pytest.mark.parametrize("change", [{"goal": "loss"}, {"evaluation": "24 prompts"}])
def test_scores_of_other_evaluations_do_not_compare(tmp_path, change):
    """Neither what is exported nor which checkpoint is kept depends on a score of another kind."""
    toy.Run(tmp_path, steps=4, evaluate_every=4, scores=(3.0,)).go()
    run = toy.Run(tmp_path, steps=16, evaluate_every=4, scores=(0.5, 0.7, 0.6), **change)
    best = run.go().best
    step, score = (12, 0.7) if "evaluation" in change else (8, -0.5)
    assert best == {**MEASURE, **change, "step": step, "score": score}
    assert run.exported[-1] == step
    assert run.kept == sorted({step, 12, 16})


def test_eight_devices_equal_one(uninterrupted, tmp_path):
    run = toy.Run(tmp_path, steps=STEPS, mesh=(2, 2, 2))
    sharded = toy.arrays(run.go())
    for name, value in uninterrupted.items():
        np.testing.assert_allclose(sharded[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_run_continues_on_another_mesh(uninterrupted, tmp_path):
    toy.Run(tmp_path, steps=7, mesh=(2, 2, 2)).go()
    rest = toy.arrays(toy.Run(tmp_path, steps=STEPS).go())
    for name, value in uninterrupted.items():
        np.testing.assert_allclose(rest[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1)])
def test_a_batch_in_pieces_equals_the_whole(tmp_path, mesh):
    """Rows differ in how many tokens count, so pieces must be weighed by that."""
    whole = toy.arrays(toy.Run(tmp_path / "whole", noise=0.0).go())
    run = toy.Run(tmp_path / "pieces", noise=0.0, mesh=mesh, accumulate_steps=4)
    pieces = toy.arrays(run.go())
    for name, value in whole.items():
        np.testing.assert_allclose(pieces[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_two_processes_equal_one(uninterrupted, tmp_path):
    """Each reads half of every batch; the first alone writes; both stop on one's signal."""
    address = f"localhost:{free_port()}"

    def start_both(pause_s):
        return [start(tmp_path, pause_s, address, "2", str(i)) for i in range(2)]

    def finish(processes, status):
        for process in processes:
            _, stderr = process.communicate(timeout=300)
            assert process.returncode == status, stderr

    pair = start_both(PAUSE_S)
    wait_for(lambda: saved_steps(tmp_path), pair[1])
    pair[1].send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    finish(pair, 143)
    finish(start_both(0), 0)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(3, STEPS + 1, 3))
    for name, value in uninterrupted.items():
        found = final(tmp_path)[name]
        np.testing.assert_allclose(found, value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_metrics_of_repeated_steps_are_written_once(tmp_path):
    toy.Run(tmp_path, steps=STEPS, checkpoint_every=EVERY).go()
    whole = [(line["step"], line["loss"]) for line in metrics(tmp_path)]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 99, "loss": 1.0}\n{"kind": "tra')
    toy.Run(tmp_path, steps=STEPS, checkpoint_every=EVERY).go()
    assert [(line["step"], line["loss"]) for line in metrics(tmp_path)] == whole
    assert [step for step, _ in whole] == list(range(3, STEPS + 1, 3))


def test_a_run_that_no_longer_gets_better_ends_early(tmp_path):
    """Early stopping also works across restarts, since checkpoints store the history."""
    scores = (1.0, 2.0, 1.5, 2.0, 1.9, 3.0)
    whole = toy.Run(tmp_path / "whole", steps=18, evaluate_every=3, scores=scores, patience=3)
    outcome = whole.go()
    assert (outcome.step, outcome.stalled, outcome.exit_status) == (15, True, 0)
    assert outcome.best["step"] == 6
    assert whole.exported == [3, 6]
    legs = {"evaluate_every": 3, "patience": 3}
    toy.Run(tmp_path / "legs", steps=9, scores=scores[:3], **legs).go()
    outcome = toy.Run(tmp_path / "legs", steps=18, scores=scores[3:], **legs).go()
    assert (outcome.step, outcome.stalled) == (15, True)
    again = toy.Run(tmp_path / "legs", steps=18, scores=(), **legs).go()
    assert (again.step, again.stalled, again.exit_status) == (15, True, 0)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_noticed_and_the_handlers_come_back(number, status):
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    with StopSignal() as stop:
        stop.record(stop.all_reduce())
        assert (stop.received, stop.exit_status) == (None, 0)
        os.kill(os.getpid(), number)
        stop.record(stop.all_reduce())
        assert (stop.received, stop.exit_status) == (number, status)
        # The next one of its kind is not for this object any more.
        assert signal.getsignal(number) is before[number]
        other = ({*before} - {number}).pop()
        assert signal.getsignal(other) is not before[other]
    assert {one: signal.getsignal(one) for one in before} == before
