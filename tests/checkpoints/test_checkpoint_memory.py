"""Peak host memory of reading, in a process of its own, as the kernel counts it."""

import functools
import json
import subprocess
import sys

import pytest
from support import SUPPORT

SCRIPT = SUPPORT / "checkpoint_memory.py"
MEGABYTES = {"plain": 200, "experts": 300, "gguf": 200, "mxfp4": 200}
# A quarter of the weights; by hand, 2 GB stay within the same few pieces of 8 MiB.
MOST_BEYOND_MEGABYTES = 50


def run(*args) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Writes a checkpoint of a kind, once, and returns its place."""

    @functools.cache
    def make(kind):
        path = tmp_path_factory.mktemp("memory") / "m"
        run("make", path, kind, MEGABYTES[kind])
        return path.with_suffix(".gguf") if kind == "gguf" else path

    return make


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "options", "weights", "most_beyond"),
    [
        ("plain", {}, 200, 1),
        ("plain", {"dtype": "bfloat16"}, 100, 1),
        ("plain", {"tensor": 8}, 200, 1),
        ("gguf", {}, 200, 1),
        ("mxfp4", {"dtype": "bfloat16"}, None, 1),
        ("experts", {}, None, 1),
        ("experts", {"expert": 4, "tensor": 2}, None, 1),
        # Beside what programs take to be compiled, one parameter is there both plain and narrow.
        ("experts", {"dtype": "bfloat16", "quantization": "int8"}, None, 2),
    ],
)
def test_reading_stays_close_to_the_weights(made, kind, options, weights, most_beyond):
    figures = json.loads(run("load", made(kind), json.dumps(options)))
    if weights is not None:
        assert figures["weights"] == pytest.approx(weights, rel=0.1)
    if kind == "mxfp4":
        assert figures["weights"] > MEGABYTES[kind]  # Experts alone, without scales and attention.
    assert figures["peak"] >= figures["before"] + 0.9 * figures["weights"]  # it was really measured
    assert figures["beyond_weights"] <= most_beyond * MOST_BEYOND_MEGABYTES
