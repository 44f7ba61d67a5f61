"""Two processes that decode together, over loopback, give what one gives."""

import json
import os
import subprocess
import sys

import pytest
from support import SUPPORT, free_port, grammars, other_targets
from support.engines import decode, engine, expected, random_prompts

WORKER = SUPPORT / "decode_worker.py"
TIMEOUT_S = 1800


def run_workers(count: int, task: dict) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each."""
    address = f"localhost:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), address, str(count), str(i), json.dumps(task)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for i in range(count)
    ]
    try:
        outputs = [worker.communicate(timeout=TIMEOUT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(w.returncode, *output) for w, output in zip(workers, outputs, strict=True)]


def test_two_processes_decode_as_one():
    prompts, limits = random_prompts([1, 35, 9, 4]), [12, 9, 15, 1]
    options = {"temperature": 0.8, "seed": 2}
    # One for each kind of state: a dense cache, pages, a history. The others' states
    # are split over devices in test_sharded_decode.py; the host does the same for all.
    names = ["dflash", "autoregressive", "ngram"]
    task = {
        "drafters": names,
        # Each process measures what cycles take, and all must go by the same measurement.
        "adaptive": ["ngram"],
        # Each process keeps its own account of pages, and all must come to the same.
        "cached": ["dflash"],
        "constrained": ["dflash"],
        "mesh": (2, 1, 2),
        "prompts": prompts,
        "limits": limits,
        "options": options,
    }
    wanted = [list(ids) for ids, _ in expected(prompts, limits, **options)]
    plain = engine(batch_size=4, max_length=48)
    constrained = grammars.decode_some(plain, prompts, limits, **options)
    decoded = [*names, "dflash, cached"]
    for status, out, err in run_workers(2, task):
        assert status == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found.pop("dflash, constrained") == [list(ids) for ids in constrained]
        assert found == dict.fromkeys(decoded, wanted)


def test_two_processes_divide_rows_alike():
    """Each process divides the rows of its replica, and both with grammars for some sequences."""
    prompts, limits = random_prompts([1, 35, 9, 4, 12, 20]), [12, 9, 15, 1, 13, 12]
    options = {"temperature": 0.8, "seed": 2}
    names = ["dspark", "dflash2-tree"]
    task = {
        "drafters": [], "divided": names, "mesh": (2, 1, 2), "prompts": prompts, "limits": limits,
        "options": options,
    }  # fmt: skip
    plain = engine(batch_size=4, max_length=48)
    wanted = [list(ids) for ids in grammars.decode_some(plain, prompts, limits, **options)]
    for status, out, err in run_workers(2, task):
        assert status == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found == {f"{name}, divided": wanted for name in names}


@pytest.mark.parametrize("family", ["qwen3_next", "gemma4 with experts"])
def test_targets_of_other_makes(family):
    """Recurrent state, rings of pages and experts, over a replica and half of the heads each."""
    prompts, limits = random_prompts([1, 35, 9, 4]), [12, 9, 15, 1]
    options = {"temperature": 0.8, "seed": 2}
    names = ["dflash", "ngram"]
    task = {
        "family": family,
        "drafters": names,
        "adaptive": ["ngram"],
        "mesh": (2, 1, 2),
        "prompts": prompts,
        "limits": limits,
        "options": options,
    }
    alone = engine(on=other_targets.target(family), batch_size=4, max_length=48)
    wanted = [list(one.output_ids) for one in decode(alone, prompts, limits, **options)]
    for status, out, err in run_workers(2, task):
        assert status == 0, err
        assert json.loads(out.splitlines()[-1]) == dict.fromkeys(names, wanted)
