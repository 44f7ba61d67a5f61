"""A little of tools/kill_training.py: one of four processes is killed, and nothing is lost."""

import pathlib
import subprocess
import sys

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "kill_training.py"
TIMEOUT_S = 1800


def test_kills_of_one_of_four_processes_cost_nothing():
    # Other tests run beside it: what is asked of a machine of its own is 20 s.
    short = ("--kills=2", "--soon_s=90", "train.steps=9", "evaluation.every=6")
    done = subprocess.run(
        [sys.executable, TOOL, *short], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, summary, verdict = done.stdout.splitlines()
    assert summary.startswith("2 kills")
    assert verdict == "no problems"
