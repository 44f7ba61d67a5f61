"""Tests of the work directory of a decode run."""

import errno
import json
import os
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash import errors
from dflash.runs import directories, outputs, workdir
from dflash.text import prompts

CONFIG = "decode:\n  temperature: 0.0\n  stop_ids: [1]\ndtype: float32\n"
HOTTER = CONFIG.replace("0.0", "0.8")


def make_record(index, clock_s=1.0, text="héllo"):
    return outputs.Record(
        index=index,
        prompt=None,
        prompt_ids=(index, 7),
        output_ids=(1, 2, 3),
        text=text,
        finish_reason="stop",
        acceptance_lengths=(2,),
        prefill_ms=1.0,
        decode_ms=2.0,
        decode_clock_s=clock_s,
    )


def make_prompts(count):
    return [prompts.Prompt(index, (index, 7), source=f"p:{index}") for index in range(count)]


def open_workdir(path, config=CONFIG, config_hash="abc"):
    return workdir.Workdir.open(path, config, config_hash)


def refusal(path, config=CONFIG):
    """Opens a work directory that must be refused, and returns the one line of complaint."""
    before = {p.name: p.read_bytes() for p in path.iterdir()} if path.is_dir() else {}
    with pytest.raises(errors.WorkdirError) as caught:
        open_workdir(path, config)
    if path.is_dir():
        assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 1
    return str(caught.value)


def test_a_run_leaves_three_files(tmp_path):
    path = tmp_path / "new" / "run"
    with open_workdir(path) as work:
        work.append(make_record(1))
        lines = (path / "outputs.jsonl").read_bytes()
        assert lines == outputs.encode(make_record(1))  # there at once, not at the end
        work.append(make_record(0))
        summary = outputs.summarize(work.completed().values(), block_size=2)
        work.write_results(summary, devices=["cpu"], versions={"jax": "0.10"})
    assert sorted(p.name for p in path.iterdir()) == [
        "config.yml",
        "outputs.jsonl",
        "results.json",
    ]
    assert (path / "config.yml").read_text() == CONFIG
    results = json.loads((path / "results.json").read_text())
    assert results["tau"] == 2.0
    assert results["acceptance_histogram"] == {"1": 0, "2": 2}
    assert results["config_hash"] == "abc"
    assert results["devices"] == ["cpu"]
    assert list(work.completed()) == [0, 1]


def test_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    open_workdir("~/run").close()
    assert (tmp_path / "run" / "config.yml").exists()


def test_resuming(tmp_path):
    with open_workdir(tmp_path) as work:
        assert work.pending(make_prompts(3)) == make_prompts(3)
        work.append(make_record(1, clock_s=2.0))
        work.append(make_record(0, clock_s=3.0))
    with open_workdir(tmp_path) as work:
        assert work.completed() == {0: make_record(0, 3.0), 1: make_record(1, 2.0)}
        assert work.pending(make_prompts(3)) == make_prompts(3)[2:]
        # The new process's clock began at zero; what stands in the file goes on from 3 s.
        assert work.append(make_record(2, clock_s=0.5)).decode_clock_s == 3.5
    with open_workdir(tmp_path) as work:
        assert work.pending(make_prompts(3)) == []
        assert len(work.pending(make_prompts(5))) == 2  # more prompts than before are welcome
        summary = outputs.summarize(work.completed().values(), block_size=2)
        assert summary.tokens_per_second == 6 / 3.5


@settings(deadline=None)
@given(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.data())
def test_a_kill_at_any_byte_loses_no_complete_record(tmp_path_factory, texts, data):
    path = tmp_path_factory.mktemp("kill")
    records = [make_record(index, text=text) for index, text in enumerate(texts)]
    lines = [outputs.encode(record) for record in records]
    whole = b"".join(lines)
    end = data.draw(st.integers(0, len(whole)))
    (path / "config.yml").write_text(CONFIG)
    (path / "outputs.jsonl").write_bytes(whole[:end])
    complete = whole[:end].count(b"\n")
    with open_workdir(path) as work:
        assert list(work.completed().values()) == records[:complete]
        for prompt in work.pending(make_prompts(len(records))):
            work.append(make_record(prompt.index, clock_s=0.0, text=texts[prompt.index]))
    written = (path / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    assert written[:complete] == lines[:complete]
    assert [outputs.decode(line).text for line in written] == texts


def test_another_config_is_refused(tmp_path):
    with open_workdir(tmp_path) as work:
        work.append(make_record(0))
    other = HOTTER.replace("dtype: float32\n", "seed: 3\n")
    assert refusal(tmp_path, other) == (
        f"{tmp_path}: belongs to a run of another config (decode.temperature: 0.0 there, 0.8 here;"
        ' dtype: "float32" there, unset here; seed: unset there, 3 here): use another --workdir, '
        "or delete this one"
    )


def test_long_lists_of_differences_are_cut(tmp_path):
    with open_workdir(tmp_path) as work:
        work.append(make_record(0))
    assert "; 1 more): " in refusal(tmp_path, CONFIG + "a: 1\nb: 1\nc: 1\nd: 1\ne: 1\nf: 1\n")


def test_config_is_compared_by_content(tmp_path):
    with open_workdir(tmp_path) as work:
        work.append(make_record(0))
    reordered = "# another comment\ndtype: float32\ndecode: {stop_ids: [1], temperature: 0.0}\n"
    open_workdir(tmp_path, reordered).close()


def test_a_run_that_wrote_nothing_makes_room(tmp_path):
    open_workdir(tmp_path).close()
    open_workdir(tmp_path, HOTTER).close()
    assert (tmp_path / "config.yml").read_text() == HOTTER


def test_files_of_others_are_not_overwritten(tmp_path):
    (tmp_path / "config.yml").write_text("theme: dark\n")
    assert 'theme: "dark" there, unset here' in refusal(tmp_path)
    (tmp_path / "config.yml").write_text("theme: [dark\n")
    assert refusal(tmp_path) == f"{tmp_path / 'config.yml'}: not a config: use another --workdir"


def test_outputs_without_config(tmp_path):
    (tmp_path / "outputs.jsonl").write_bytes(b"precious, and without a line end")
    assert "config.yml: missing, so nobody knows" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"\x00" * 20 + b"\n", ":2: damaged line (Expecting value"),
        (b"\xff\n", ":2: damaged line ("),
        (b"{}\n", ":2: damaged line (no index, prompt"),
        (outputs.encode(make_record(0)), ":2: prompt 0 for the second time"),
    ],
)
def test_damage_before_the_end(tmp_path, damage, message):
    (tmp_path / "config.yml").write_text(CONFIG)
    lines = [outputs.encode(make_record(0)), damage, outputs.encode(make_record(1))]
    (tmp_path / "outputs.jsonl").write_bytes(b"".join(lines))
    assert message in refusal(tmp_path)


def test_changed_prompts(tmp_path):
    with open_workdir(tmp_path) as work:
        work.append(make_record(0))
        work.append(make_record(2))
        with pytest.raises(errors.WorkdirError, match="holds prompt 2, but now there are only 2"):
            work.pending(make_prompts(2))
        changed = [prompts.Prompt(0, (0, 8), source="p:0"), *make_prompts(3)[1:]]
        with pytest.raises(errors.WorkdirError, match="another prompt 0 than p:0 is now"):
            work.pending(changed)


def test_two_runs_at_once(tmp_path):
    with open_workdir(tmp_path):
        assert refusal(tmp_path) == (
            f"{tmp_path}: in use by another run: wait for it, or use another --workdir"
        )
    open_workdir(tmp_path).close()  # free again


def test_a_refused_run_lets_go_of_the_lock(tmp_path):
    with open_workdir(tmp_path) as work:
        work.append(make_record(0))
    refusal(tmp_path, HOTTER)
    open_workdir(tmp_path).close()


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directories.fcntl, "flock", flock)
    open_workdir(tmp_path).close()


def test_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file") == f"{tmp_path / 'file'}: cannot be written: not a directory"
    inside = tmp_path / "file" / "run"
    assert refusal(inside) == f"{inside}: cannot be written: Not a directory"


@pytest.mark.parametrize("stage", ["mkdir", "open"])
def test_no_permission(tmp_path, monkeypatch, stage):
    # Modes do not stop root, as whom tests often run, so the refusal is simulated.
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    owner = pathlib.Path if stage == "mkdir" else os
    monkeypatch.setattr(owner, stage, refuse)
    with pytest.raises(errors.WorkdirError, match=r"cannot be written: Permission denied$"):
        open_workdir(tmp_path / "run")


def test_a_full_disk(tmp_path, monkeypatch):
    with open_workdir(tmp_path) as work:
        work.append(make_record(0))
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        with pytest.raises(errors.WorkdirError, match=r"outputs\.jsonl: cannot be written: only 5"):
            work.append(make_record(1))
        monkeypatch.undo()
        assert list(work.completed()) == [0]
    with open_workdir(tmp_path) as work:
        assert list(work.completed()) == [0]


def test_results_are_never_half_written(tmp_path, monkeypatch):
    with open_workdir(tmp_path) as work:
        summary = outputs.summarize([make_record(0)], block_size=2)
        work.write_results(summary, run=1)
        before = (tmp_path / "results.json").read_bytes()

        def fsync(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(errors.WorkdirError, match="No space left on device"):
            work.write_results(summary, run=2)
        assert (tmp_path / "results.json").read_bytes() == before
        assert len(list(tmp_path.iterdir())) == 3  # no temporary file either


def test_records_in_memory_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with workdir.Records([make_record(0, clock_s=2.0)]) as records:
        assert records.append(make_record(1)).decode_clock_s == 3.0
        records.write_results(outputs.summarize(records.completed().values(), block_size=2))
        assert records.pending(make_prompts(3)) == make_prompts(3)[2:]
    assert list(tmp_path.iterdir()) == []
