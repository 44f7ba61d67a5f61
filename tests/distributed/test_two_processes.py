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


OPTIONS = {"temperature": 0.8, "seed": 2}


def run_workers(prompts, limits, **task) -> list[dict]:
    """The outputs that each of two processes has, by name; see `support/decode_worker.py`."""
    given = {"mesh": (2, 1, 2), "prompts": prompts, "limits": limits, "options": OPTIONS} | task
    command = [sys.executable, str(WORKER), f"localhost:{free_port()}", "2"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = {**os.environ, "JAX_PLATFORMS": "cpu"}
    workers = [subprocess.Popen([*command, str(i), json.dumps(given)], **options) for i in range(2)]
    found = []
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=TIMEOUT_S)
            assert worker.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for worker in workers:
            worker.kill()
    return found


def test_two_processes_decode_as_one():
    prompts, limits = random_prompts([1, 35, 9, 4]), [12, 9, 15, 1]
    # One for each kind of state: a dense cache, pages, a history. The others' states
    # are split over devices in test_sharded_decode.py; the host does the same for all.
    names = ["dflash", "autoregressive", "ngram"]
    wanted = [list(ids) for ids, _ in expected(prompts, limits, **OPTIONS)]
    plain = engine(batch_size=4, max_length=48)
    constrained = grammars.decode_some(plain, prompts, limits, **OPTIONS)
    # Each process measures what cycles take, and keeps an account of pages: all must go by the
    # same measurement, and come to the same pages.
    others = {"adaptive": ["ngram"], "cached": ["dflash"], "constrained": ["dflash"]}
    for found in run_workers(prompts, limits, drafters=names, **others):
        assert found.pop("dflash, constrained") == [list(ids) for ids in constrained]
        assert found == dict.fromkeys([*names, "dflash, cached"], wanted)


def test_two_processes_divide_rows_alike():
    """Each process divides the rows of its replica, and both with grammars for some sequences."""
    prompts, limits = random_prompts([1, 35, 9, 4, 12, 20]), [12, 9, 15, 1, 13, 12]
    names = ["dspark", "dflash2-tree"]
    plain = engine(batch_size=4, max_length=48)
    wanted = [list(ids) for ids in grammars.decode_some(plain, prompts, limits, **OPTIONS)]
    for found in run_workers(prompts, limits, drafters=[], divided=names):
        assert found == {f"{name}, divided": wanted for name in names}


@pytest.mark.parametrize("family", ["qwen3_next", "gemma4 with experts"])
def test_targets_of_other_makes(family):
    """Recurrent state, rings of pages and experts, over a replica and half of the heads each."""
    prompts, limits = random_prompts([1, 35, 9, 4]), [12, 9, 15, 1]
    names = ["dflash", "ngram"]
    alone = engine(on=other_targets.target(family), batch_size=4, max_length=48)
    wanted = [list(one.output_ids) for one in decode(alone, prompts, limits, **OPTIONS)]
    task = {"family": family, "drafters": names, "adaptive": ["ngram"]}
    assert run_workers(prompts, limits, **task) == [dict.fromkeys(names, wanted)] * 2
