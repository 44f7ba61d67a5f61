"""The study of serving: a real server, a real client, and figures that fit together."""

import json

import pytest
from support.models import BYTE_TARGET

from dflash import benchmark

pytest.importorskip("httpx2", reason="needs the extra serve")

CONFIG = f"""
target: {BYTE_TARGET}
strategies: {{ngram: {{name: ngram, block_size: 4}}}}
tasks: [math]
prompts_per_task: 2
decode: {{max_new_tokens: 8, batch_size: 2, sync_every: 4, page_size: 16, prefill_chunk: 64,
  ignore_eos: true}}
study: {{name: serve, values: [1, 2]}}
dtype: float32
"""


def test_a_study_of_serving(tmp_path, capsys):
    (tmp_path / "config.yml").write_text(CONFIG)
    values = benchmark.run(tmp_path / "config.yml", workdir=tmp_path / "w")
    assert values["complete"]
    assert values == json.loads((tmp_path / "w" / "study.json").read_text())
    rows = values["rows"]
    loads = [(row["drafter"], row["at_a_time"], row["rate"] is None) for row in rows]
    each = [(1, True), (2, True), (None, False), (None, False)]
    assert loads == [(name, *load) for name in ("none", "ngram") for load in each]
    for row in rows:
        assert row["requests"] >= 2
        assert row["tokens_per_second"] == pytest.approx(8 * row["requests_per_second"])
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert row["tpot_p50_ms"] <= row["tpot_p99_ms"]
    assert {row["tau"] for row in rows if row["drafter"] == "none"} == {1.0}
    assert min(row["tau"] for row in rows if row["drafter"] == "ngram") >= 1.0
    assert (tmp_path / "w" / "study.png").read_bytes().startswith(b"\x89PNG")
    assert "A server under load" in capsys.readouterr().out


def test_forced_acceptance(tmp_path, capsys):
    (tmp_path / "config.yml").write_text(CONFIG.replace("values: [1, 2]", "values: [2]"))
    lengths = {"prompt_tokens": 9, "acceptance_lengths": [3, 2, 4, 1, 2]}
    (tmp_path / "trace.json").write_text(json.dumps([lengths] * 2))
    values = benchmark.run(tmp_path / "config.yml", f"trace={tmp_path / 'trace.json'}")
    taus = {row["drafter"]: row["tau"] for row in values["rows"]}
    assert taus == {
        "none": 1.0,
        "ngram": pytest.approx(7 / 3),
    }  # 3, 2 and 2 of 4: then there are 8 tokens
    assert values["acceptance"]["source"] != "measured"
