"""The records of a decode run: in a file that survives a kill, or in memory."""

import contextlib
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failure

from dflash import errors
from dflash.config import loader, schema
from dflash.runs import outputs, records
from dflash.runs.directory import RunDirectory
from dflash.text import prompts

CONFIG = schema.DecodeRun(target=schema.TargetConfig(checkpoint="weights"))


def make_record(index, clock_s=1.0, text="héllo"):
    return outputs.Record(
        index=index, prompt=None, prompt_ids=(index, 7), output_ids=(1, 2, 3), text=text,
        finish_reason="stop", acceptance_lengths=(2,), prefill_ms=1.0, decode_ms=2.0,
        decode_clock_s=clock_s,
    )  # fmt: skip


def make_prompts(count):
    return [prompts.Prompt(index, (index, 7), source=f"p:{index}") for index in range(count)]


@contextlib.contextmanager
def open_records(path):
    with (
        RunDirectory(path, CONFIG, is_used=records.has_outputs) as held,
        records.open_in(held) as found,
    ):
        yield found


def refusal(path):
    """Opens records that must be refused, and returns the one line of complaint."""
    before = (path / "outputs.jsonl").read_bytes()
    message = failure(open_records(path).__enter__, kind=errors.WorkdirError)
    assert (path / "outputs.jsonl").read_bytes() == before
    return message


def test_a_run_leaves_its_records_and_results(tmp_path):
    path = tmp_path / "new" / "run"
    with open_records(path) as work:
        work.append(make_record(1))
        lines = (path / "outputs.jsonl").read_bytes()
        assert lines == outputs.encode(make_record(1))  # there at once, not at the end
        work.append(make_record(0))
        summary = outputs.summarize(work.completed().values(), block_size=2)
        work.write_results(summary, devices=["cpu"], versions={"jax": "0.10"})
    assert sorted(p.name for p in path.iterdir()) == [
        ".lock", "config.yml", "outputs.jsonl", "results.json",
    ]  # fmt: skip
    assert (path / "config.yml").read_text() == loader.to_yaml(CONFIG)
    results = json.loads((path / "results.json").read_text())
    assert results["tau"] == 2.0
    assert results["acceptance_histogram"] == {"1": 0, "2": 2}
    assert results["config_hash"] == loader.config_hash(CONFIG)
    assert results["devices"] == ["cpu"]
    assert list(work.completed()) == [0, 1]


def test_a_record_is_on_the_disk_when_it_is_reported(tmp_path, monkeypatch):
    """A power failure after `append` loses nothing: the line was synced, and the file's name."""
    path, synced = tmp_path / "outputs.jsonl", []
    fsync = os.fsync

    def record(descriptor):
        synced.append((os.fstat(descriptor).st_ino, path.exists() and path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with open_records(tmp_path) as held:
        assert synced[-1] == (tmp_path.stat().st_ino, b"")
        held.append(make_record(0))
        assert synced[-1] == (path.stat().st_ino, outputs.encode(make_record(0)))


def test_resuming(tmp_path):
    with open_records(tmp_path) as work:
        assert work.pending(make_prompts(3)) == make_prompts(3)
        work.append(make_record(1, clock_s=2.0))
        work.append(make_record(0, clock_s=3.0))
    with open_records(tmp_path) as work:
        assert work.completed() == {0: make_record(0, 3.0), 1: make_record(1, 2.0)}
        assert work.pending(make_prompts(3)) == make_prompts(3)[2:]
        # The new process's clock began at zero; what stands in the file goes on from 3 s.
        assert work.append(make_record(2, clock_s=0.5)).decode_clock_s == 3.5
    with open_records(tmp_path) as work:
        assert work.pending(make_prompts(3)) == []
        assert len(work.pending(make_prompts(5))) == 2  # more prompts than before are welcome
        summary = outputs.summarize(work.completed().values(), block_size=2)
        assert summary.tokens_per_second == 6 / 3.5


@settings(max_examples=30)
@given(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.data())
def test_a_kill_at_any_byte_loses_no_complete_record(tmp_path_factory, texts, data):
    path = tmp_path_factory.mktemp("kill")
    made = [make_record(index, text=text) for index, text in enumerate(texts)]
    lines = [outputs.encode(record) for record in made]
    whole = b"".join(lines)
    end = data.draw(st.integers(0, len(whole)))
    (path / "config.yml").write_text(loader.to_yaml(CONFIG))
    (path / "outputs.jsonl").write_bytes(whole[:end])
    complete = whole[:end].count(b"\n")
    with open_records(path) as work:
        assert list(work.completed().values()) == made[:complete]
        for prompt in work.pending(make_prompts(len(made))):
            work.append(make_record(prompt.index, clock_s=0.0, text=texts[prompt.index]))
    written = (path / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    assert written[:complete] == lines[:complete]
    assert [outputs.decode(line).text for line in written] == texts


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"\x00" * 20 + b"\n", ":2: damaged line (Expecting value"),
        (b"\xff\n", ":2: damaged line ("),
        (b"{}\n", ":2: damaged line (no index, prompt"),
        (b"[" * 100_000 + b"\n", ":2: damaged line (nested too deeply"),
        (outputs.encode(make_record(3)).replace(b"[2]", b"[99]"),
         ":2: damaged line (acceptance_lengths: sum to 99, not to len(output_ids) - 1 = 2): "
         "delete it to decode its prompt again, or use another --workdir"),
        (outputs.encode(make_record(0)), ":2: prompt 0 occurs twice"),
    ],
)  # fmt: skip
def test_damage_before_the_end(tmp_path, damage, message):
    (tmp_path / "config.yml").write_text(loader.to_yaml(CONFIG))
    lines = [outputs.encode(make_record(0)), damage, outputs.encode(make_record(1))]
    (tmp_path / "outputs.jsonl").write_bytes(b"".join(lines))
    assert message in refusal(tmp_path)


def test_a_baseline_alone_makes_a_directory_used(tmp_path):
    assert not records.has_outputs(tmp_path)
    (tmp_path / "outputs.jsonl").touch()
    assert not records.has_outputs(tmp_path)
    (tmp_path / "baseline.jsonl").write_bytes(outputs.encode(make_record(0)))
    assert records.has_outputs(tmp_path)


def test_changed_prompts(tmp_path):
    with open_records(tmp_path) as work:
        work.append(make_record(0))
        work.append(make_record(2))
        with pytest.raises(errors.WorkdirError, match="holds prompt 2, but now there are only 2"):
            work.pending(make_prompts(2))
        changed = [prompts.Prompt(0, (0, 8), source="p:0"), *make_prompts(3)[1:]]
        with pytest.raises(errors.WorkdirError, match="its prompt 0 differs from p:0"):
            work.pending(changed)


def test_a_full_disk(tmp_path, monkeypatch):
    with open_records(tmp_path) as work:
        work.append(make_record(0))
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        with pytest.raises(errors.WorkdirError, match=r"outputs\.jsonl: cannot be written: only 5"):
            work.append(make_record(1))
        monkeypatch.undo()
        assert list(work.completed()) == [0]
    with open_records(tmp_path) as work:
        assert list(work.completed()) == [0]
        work.append(make_record(1))  # where the torn line was
    with open_records(tmp_path) as work:
        assert list(work.completed()) == [0, 1]


def test_records_in_memory_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with records.Records([make_record(0, clock_s=2.0)]) as held:
        assert held.append(make_record(1)).decode_clock_s == 3.0
        held.write_results(outputs.summarize(held.completed().values(), block_size=2))
        assert held.pending(make_prompts(3)) == make_prompts(3)[2:]
    assert list(tmp_path.iterdir()) == []
