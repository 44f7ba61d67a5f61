"""The sweep command on real models, small: loads, resumes, refusals, one point a host."""

import csv
import json
import pathlib

import pytest
from support import outcome, read_lines
from support.models import BYTE_TARGET

from dflash import decode, sweep

CONFIG = f"""
target: {BYTE_TARGET}
decode: {{max_new_tokens: 6, baseline: true, page_size: 16, prefill_chunk: 16}}
prompts: {{text: [One, Two two]}}
dtype: float32
"""
DFLASH = """
drafter:
  name: dflash
  checkpoint: random
  architecture: {num_hidden_layers: 1, block_size: 4, target_layer_ids: [0]}
"""
BLOCK = """
sweep:
  product:
    decode.temperature: [0.5, 0.9]
    target.architecture.rope_theta: [10000, 20000]
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in a fresh directory; returns (exit status, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text(CONFIG)
    (tmp_path / "s.yml").write_text("base: [c.yml]\n" + BLOCK)

    def run_with(*argv, command=sweep, config="s.yml"):
        return outcome(capsys, command.main, config, *argv)[::2]

    return run_with


def table():
    with pathlib.Path("w/sweep.csv").open(newline="") as lines:
        return {row["name"]: row for row in csv.DictReader(lines)}


def output_ids(directory):
    records = read_lines(pathlib.Path(directory) / "outputs.jsonl")
    return {record["index"]: record["output_ids"] for record in records}


def test_a_sweep_from_end_to_end(run):
    status, err = run("--workdir=w")
    assert status == 0, err
    rows = table()
    assert len(rows) == 4
    for name, row in rows.items():
        results = json.loads(pathlib.Path(f"w/points/{name}/results.json").read_text())
        assert float(row["tau"]) == results["tau"]
        assert float(row["tokens_per_second"]) == results["tokens_per_second"] > 0
        assert row["config_hash"] == results["config_hash"]
        assert float(row["speed_up"]) == results["baseline"]["speed_up"] > 0
    # Temperature is the slower axis, but weights are read once for each of the two targets, and
    # the drafter with them.
    assert err.count("loading the target") == 2
    assert err.count("loading the drafter") == 2
    assert "w/sweep.csv has all figures" in err
    assert "decode.temperature" in err.rpartition("\n\n")[2]  # the table comes last
    # A point is what the decode command makes of the same values, kept weights or not.
    values = "decode.temperature=0.9", "target.architecture.rope_theta=10000"
    assert run(*values, "--workdir=alone", command=decode, config="c.yml")[0] == 0
    assert output_ids("alone") == output_ids(f"w/points/{','.join(values)}")

    status, err = run("--workdir=w")
    assert status == 0
    assert "4 of 4 points are already finished" in err
    assert "loading" not in err
    assert table() == rows


def test_drafters_change_while_the_target_stays(run):
    block = "sweep: {zip: {drafter.block_size: [2, 2, 3], decode.seed: [1, 2, 1]}}"
    pathlib.Path("s.yml").write_text(f"base: [c.yml]{DFLASH}{block}\n")
    status, err = run("--workdir=w")
    assert status == 0, err
    assert len(table()) == 3
    assert err.count("loading the target") == 1
    assert err.count("loading the drafter") == 2


def test_bad_points_are_reported_before_anything_runs(run):
    status, err = run("--workdir=w", "sweep.product.decode.temperature=[0, -1]")
    assert status == 2
    expected = "error: command line: decode.temperature: expected a number >= 0, got -1 ["
    assert err.startswith(expected)
    # What only the models know: the last point asks for more positions than the target has.
    status, err = run("--workdir=w", "sweep.product.decode.max_new_tokens=[4, 300]")
    assert status == 2
    assert "made for 256 positions" in err
    assert "max_new_tokens=300" in err
    assert not pathlib.Path("w").exists()
    status, err = run("--workdir=w", "prompts.text=[]")
    assert status == 2
    assert err == (
        "error: prompts: required: text, file or dataset; a sweep reads no prompts from stdin\n"
    )
    status, err = run("--workdir=w", "--coordinator_address=host:1")
    assert status == 2
    assert not pathlib.Path("w").exists()


def test_a_dry_run_lists_the_points(run, capsys):
    status, out, _ = outcome(capsys, sweep.main, "s.yml", "--dry_run")
    assert status == 0
    lines = out.splitlines()
    assert lines[1] == "   1  decode.temperature=0.5,target.architecture.rope_theta=20000"
    assert len(lines) == 4
