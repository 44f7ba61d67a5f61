"""The contract of windows that are chosen for each sequence: the output is plain decoding's."""

import numpy as np
import pytest
from support.engines import change_often, check_plain, engine, random_prompts
from support.models import drafter

from dflash.drafters.parts.bandit import Counts

WAYS = {
    "whole": {},
    "sizes": {"adaptive_blocks": True},
    "copies": {"lookup": True},
    "rejection": {"verify": "rejection"},
    "replicas": {"mesh": (2, 1, 1), "batch_size": 4, "num_pages": None},
}
# All strategies inherit their windows from DFlash; those of DSpark draft serially.
CASES = [
    *(("dflash", False, way) for way in WAYS if way != "sizes"),
    ("dflash", True, "sizes"),
    ("dspark", False, "sizes"),
]
PROMPTS, LIMITS = random_prompts([31, 30, 29, 28, 27, 5]), [32, 32, 31, 32, 32, 20]


@pytest.mark.parametrize(
    ("name", "tree", "way"),
    CASES,
    ids=[f"{name}-tree-{way}" if tree else f"{name}-{way}" for name, tree, way in CASES],
)
def test_output_is_that_of_plain_decoding(name, tree, way):
    options = {"batch_size": 5, "sync_every": 2, "max_length": 64, "num_pages": 16} | WAYS[way]
    mesh = options.get("mesh", (1, 1, 1))
    model = drafter(name, block_size=4, tree=tree, mesh=mesh)
    model.windows = (8, 24)
    run = engine(model, **options)
    if way == "sizes":
        change_often(run)
    for temperature in (0.0,) if way == "rejection" else (0.0, 0.8):
        done = check_plain(run, PROMPTS, LIMITS, temperature=temperature, seed=3)
    pool = run.new_state().drafter
    while not isinstance(pool, Counts):
        pool = pool.shared or pool.inner
    # Every choice was made that the lengths allow.
    np.testing.assert_array_equal(np.asarray(pool.tried) > 0, [[0, 0, 1], [1, 0, 1], [1, 1, 1]])
    assert sum(one.preemptions for one in done) > 0 or mesh != (1, 1, 1)
