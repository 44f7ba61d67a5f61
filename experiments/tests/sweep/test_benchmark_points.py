"""Sweeps whose points are benchmarks."""

import csv
import itertools
import json

import pytest
from support.models import BYTE_TARGET

from experiments.sweep import __main__ as sweep

CONFIG = f"""
target: {BYTE_TARGET}
drafter:
  name: dflash
  checkpoint: random
  architecture: {{num_hidden_layers: 1, block_size: 4, target_layer_ids: [0]}}
strategies: {{dflash: }}
trace: trace.json
prompts_per_task: 3
rounds: 1
replay_tokens: 4
decode: {{max_new_tokens: 24, sync_every: 4, page_size: 16, prefill_chunk: 64}}
dtype: float32
sweep: {{run: benchmark, product: {{decode.batch_size: [1, 2]}}}}
"""
LENGTHS = [[4, 1, 2, 4, 3], [1, 1, 4], [2, 2, 2, 2], [3, 3]]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in a fresh directory; returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yml").write_text(CONFIG)
    tasks = zip(("gsm8k", "gsm8k", "alpaca", "gsm8k"), LENGTHS, strict=True)
    rows = [{"dataset": a, "prompt_tokens": 20, "acceptance_lengths": b} for a, b in tasks]
    (tmp_path / "trace.json").write_text(json.dumps(rows))

    def run_with(*argv):
        with pytest.raises(SystemExit) as caught:
            sweep.main(["s.yml", *argv])
        return caught.value.code, *capsys.readouterr()

    return run_with


def test_a_sweep_has_the_figures_of_every_cell_and_runs_each_point_once(run, tmp_path):
    status, _, err = run("--workdir=w")
    assert status == 0, err
    table = (tmp_path / "w/sweep.csv").read_text()
    rows = {row["name"]: row for row in csv.DictReader(table.splitlines())}
    assert len(rows) == 2
    for name, row in rows.items():
        lines = (tmp_path / "w/points" / name / "results.csv").read_text().splitlines()
        cells = {(line["task"], line["strategy"]): line for line in csv.DictReader(lines)}
        for task, figure in itertools.product(("alpaca", "gsm8k"), ("tau", "speedup", "draft_ms")):
            assert row[f"{task}.dflash.{figure}"] == cells[task, "dflash"][figure]
        assert float(row["alpaca.dflash.tau"]) == 2.0
        assert "alpaca.none.tau" not in row
    # However narrow the terminal, no name is cut: lines break instead.
    assert "gsm8k.dflash.speedup" in "".join(err.split())
    assert "…" not in err.rpartition("\n\n")[2]
    status, out, err = run("--workdir=w")
    assert (status, out) == (0, "")
    assert "2 of 2 points are already finished" in err
    assert (tmp_path / "w/sweep.csv").read_text() == table


def test_a_sweep_runs_no_studies(run, tmp_path):
    status, _, err = run("study.name=cycle", "--workdir=w")
    assert status == 2
    assert err == "error: study: sweeps do not run studies; use dflash benchmark for this one\n"
    assert not (tmp_path / "w").exists()
