"""Peak host memory of reading, in a process of its own, as the kernel counts it."""

import json
import subprocess
import sys

import pytest
from support import SUPPORT

SCRIPT = SUPPORT / "checkpoint_memory.py"
MEGABYTES = 200
# A quarter of the weights; by hand, 2 GB stay within the same few pieces of 8 MiB.
MOST_BEYOND_MEGABYTES = 50


def run(*args) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A checkpoint of which three fifths are experts, a tensor each."""
    path = tmp_path_factory.mktemp("memory") / "experts"
    run("make", path, "--megabytes", 300, "--experts")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "checkpoint"
    run("make", path, "--megabytes", MEGABYTES)
    return path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "options", [["--dtype=float32"], ["--dtype=bfloat16"], ["--dtype=float32", "--tensor=8"]]
)
def test_reading_stays_close_to_the_weights(directory, options):
    figures = json.loads(run("load", directory, *options))
    share = 0.5 if "--dtype=bfloat16" in options else 1
    assert figures["weights"] == pytest.approx(MEGABYTES * share, rel=0.1)
    assert figures["peak"] >= figures["before"] + 0.9 * figures["weights"]  # it was really measured
    assert figures["beyond_weights"] <= MOST_BEYOND_MEGABYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_gguf_file_is_dequantized_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run("make", tmp_path / "m", "--megabytes", MEGABYTES, "--gguf")
    figures = json.loads(run("load", tmp_path / "m.gguf"))
    assert figures["weights"] == pytest.approx(MEGABYTES, rel=0.1)
    assert figures["peak"] >= figures["before"] + 0.9 * figures["weights"]
    assert figures["beyond_weights"] <= MOST_BEYOND_MEGABYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_experts_in_four_bits_are_widened_in_pieces(tmp_path):
    run("make", tmp_path / "m", "--megabytes", MEGABYTES, "--mxfp4")
    figures = json.loads(run("load", tmp_path / "m", "--dtype=bfloat16"))
    assert figures["weights"] > MEGABYTES  # Experts alone, without scales and attention.
    assert figures["peak"] >= figures["before"] + 0.9 * figures["weights"]
    assert figures["beyond_weights"] <= MOST_BEYOND_MEGABYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("options", "most_beyond"),
    [
        (["--dtype=float32"], MOST_BEYOND_MEGABYTES),
        (["--dtype=float32", "--expert=4", "--tensor=2"], MOST_BEYOND_MEGABYTES),
        # Beside what programs take to be compiled, one parameter is there both plain and narrow.
        (["--dtype=bfloat16", "--quantization=int8"], 2 * MOST_BEYOND_MEGABYTES),
    ],
)
def test_experts_are_stacked_as_they_are_read(experts, options, most_beyond):
    figures = json.loads(run("load", experts, *options))
    assert figures["peak"] >= figures["before"] + 0.9 * figures["weights"]
    assert figures["beyond_weights"] <= most_beyond
