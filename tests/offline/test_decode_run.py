"""Conversations of several turns, and answers that are checked, through the decode command."""

import functools
import json

import pytest
from support import outcome, read_lines, write_lines
from support.models import BYTE_TARGET

from dflash import decode
from dflash.drafters.dflash_config import DFlashConfig
from dflash.offline import decode_run

CONFIG = f"""
target: {BYTE_TARGET}
decode: {{max_new_tokens: 6, page_size: 16, max_length: 128, batch_size: 2, temperature: 0.9,
  prefill_chunk: 32, partial_dispatches: false}}
dtype: float32
"""
CONVERSATIONS = [["What?", "Why is it so?", "Oh."], ["One turn only."]]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in a fresh directory; returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text(CONFIG)
    return functools.partial(outcome, capsys, decode.main, "c.yml")


def records(path):
    return {record["index"]: record for record in read_lines(path / "outputs.jsonl")}


def test_a_later_turn_is_asked_after_the_model_s_own_answer(run, tmp_path):
    write_lines(tmp_path / "turns.jsonl", [{"turns": turns} for turns in CONVERSATIONS])
    status, _, err = run("prompts.file=turns.jsonl", "--workdir=w")
    assert status == 0, err
    found = records(tmp_path / "w")
    assert sorted(found) == list(range(4))
    said = [(message["role"], message["content"]) for message in found[2]["prompt"]]
    assert said == [
        ("user", "What?"),
        ("assistant", found[0]["text"]),
        ("user", "Why is it so?"),
        ("assistant", found[1]["text"]),
        ("user", "Oh."),
    ]
    lines = read_lines(tmp_path / "w" / "outputs.jsonl")
    clocks = [line["decode_clock_s"] for line in lines]
    assert clocks == sorted(clocks)  # the clock goes on from round to round
    results = json.loads((tmp_path / "w" / "results.json").read_text())
    assert results["prompts"] == 4
    assert results["decode_seconds"] == clocks[-1]
    # The prompt of a turn is what a user would send: the same tokens, asked as a prompt of its own.
    everything = [{"messages": found[index]["prompt"]} for index in range(4)]
    write_lines(tmp_path / "whole.jsonl", everything)
    assert run("prompts.file=whole.jsonl", "--workdir=whole")[0] == 0
    whole = records(tmp_path / "whole")
    for index in range(4):
        assert whole[index]["prompt_ids"] == found[index]["prompt_ids"]
        assert whole[index]["output_ids"] == found[index]["output_ids"]

    # A run that was killed between turns goes on with the turns that are missing.
    order = [line["index"] for line in lines]
    assert (sorted(order[:2]), order[2:]) == ([0, 3], [1, 2])  # all first turns, then later ones
    write_lines(tmp_path / "w" / "outputs.jsonl", lines[:3])
    status, _, err = run("prompts.file=turns.jsonl", "--workdir=w")
    assert status == 0, err
    assert {index: one["output_ids"] for index, one in records(tmp_path / "w").items()} == {
        index: one["output_ids"] for index, one in found.items()
    }


def test_answers_of_a_data_set_are_checked(run, tmp_path):
    """A published set by its name; its raw file is there, or the message says where it belongs."""
    status, _, err = run("prompts.dataset=gsm8k", "prompts.raw_dir=raw", "--dry_run")
    assert status == 2
    last = err.splitlines()[-1]
    assert last.startswith(
        f"error: {tmp_path}/raw/gsm8k/test.jsonl: missing: put a copy of https://"
    )
    rows = [{"question": f"{i}?", "answer": f"So.\n#### {i}"} for i in range(3)]
    write_lines(tmp_path / "raw" / "gsm8k" / "test.jsonl", rows)
    greedy = "decode.temperature=0"  # Compiles in a third of the time.
    status, _, err = run("prompts.dataset=gsm8k", "prompts.raw_dir=raw", greedy, "--workdir=w")
    assert status == 0, err
    results = json.loads((tmp_path / "w" / "results.json").read_text())
    assert results["answers"]["checked"] == 3
    assert f"answers  {results['answers']['correct']} of 3 correct" in err
    asked = records(tmp_path / "w")[0]["prompt"][0]["content"]
    assert asked.startswith("0?\nPlease reason step by step")


def test_a_drafter_on_its_own_device_is_shown_with_its_hit_rate(run, tmp_path):
    drafter = "drafter={name: autoregressive, checkpoint: random, block_size: 4, overlap: ssd}"
    status, _, err = run("prompts.text=[abc, abcabcabc]", drafter, "--workdir=w")
    assert status == 0, err
    assert "speculation hits" in err
    assert "time per cycle" in err
    results = json.loads((tmp_path / "w" / "results.json").read_text())
    assert len(results["devices"]) == 2
    events = results["events"]
    assert events["speculation_lookups"] >= events["speculation_hits"] >= 0
    assert events["speculation_lookups"] > 0
    assert results["mean_cycle_ms"] > 0
    status, _, err = run("prompts.text=[abc, abcabcabc]", "drafter.name=none", "--workdir=p")
    assert status == 0, err
    texts = [{i: one["output_ids"] for i, one in records(tmp_path / d).items()} for d in "wp"]
    assert texts[0] == texts[1]


def test_drafting_that_does_not_pay_is_told():
    told = decode_run._warnings
    (line,) = told(0.821, 8, DFlashConfig(block_size=8))
    assert line.startswith("warning: drafting is slower than plain decoding (0.82 ×); try drafter.")
    assert line.endswith("block_size=auto, which measures, or drafter.name=none")
    (line,) = told(0.821, 8, DFlashConfig(block_size="auto"))
    assert line.endswith("(0.82 ×); try drafter.name=none")
    for speed_up, rows in ((0.9, 1), (1.2, 8), (None, 8)):
        assert told(speed_up, rows, DFlashConfig()) == []
