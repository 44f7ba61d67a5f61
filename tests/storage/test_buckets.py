"""Buckets: what works on a disk works in one, against a server that speaks Google's protocol."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors import numpy as safetensors
from support import (
    exit_status,
    failure,
    outcome,
    read_lines,
    run_python,
    tiny_distillation,
    toy,
    write_lines,
)
from support.models import make_target

from dflash import convert, decode, distill, errors
from dflash.checkpoints import checkpoint, safetensors_header, safetensors_io, tensor_map
from dflash.config import loader, schema
from dflash.distillation import stages
from dflash.inference.scheduler import Scheduler
from dflash.runs.directory import RunDirectory
from dflash.storage import files, growing, paths
from dflash.training.checkpoints import DAMAGED, Checkpoints

CONFIG = """
target: {{checkpoint: {target}}}
drafter: {{name: none}}
decode: {{max_new_tokens: 8, ignore_eos: true, page_size: 16, prefill_chunk: 16, batch_size: 1}}
prompts: {{file: {prompts}}}
dtype: float32
"""
PROMPTS = [[1, 2, 3], [5], [6, 7] * 9, [7, 7], [4, 3, 2, 1]]
# Decodes in a process of its own: an object is written at once, and never gets a third record.
STUCK = """
import itertools, sys, time
from dflash import decode
from dflash.storage import growing
growing.INTERVAL_S, growing._PAUSE_RATIO = 0.02, 0
append, before = growing._GrowingObject.append, itertools.count()
def wait_or_append(self, data):
    time.sleep(600 if next(before) == 2 else 0)
    append(self, data)
growing._GrowingObject.append = wait_or_append
decode.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def bucket():
    from support import buckets  # Takes a second.

    with buckets.served() as url:
        yield paths.to_path(url)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A checkpoint of a tiny target, on disk."""
    directory = tmp_path_factory.mktemp("models") / "target"
    model = make_target(vocab_size=12, num_hidden_layers=2)
    checkpoint.save(model, directory, model.config_to_hf(model.arch))
    return directory


@pytest.fixture(scope="module")
def config(target, bucket, tmp_path_factory):
    """A config whose prompts and weights are in the bucket."""
    files.copy_tree(target, bucket / "target", "config.json")
    write_lines(bucket / "prompts.jsonl", [{"prompt_ids": ids} for ids in PROMPTS])
    path = tmp_path_factory.mktemp("config") / "c.yml"
    path.write_text(CONFIG.format(target=bucket / "target", prompts=bucket / "prompts.jsonl"))
    return path


def output_ids(directory, name="outputs.jsonl"):
    return {line["index"]: line["output_ids"] for line in read_lines(directory / name)}


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """Outputs of a run on a disk."""
    workdir = tmp_path_factory.mktemp("whole")
    assert exit_status(decode.main, config, "--workdir", workdir) == 0
    return output_ids(workdir)


def test_a_killed_run_goes_on_in_a_bucket(config, whole, bucket, capsys):
    """SIGKILL amid a run, then the same command: every prompt once, the same ids."""
    workdir = bucket / "killed"
    command = [sys.executable, "-c", STUCK, config, "--workdir", str(workdir)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline, path = time.time() + 300, workdir / "outputs.jsonl"
    while time.time() < deadline and not (path.exists() and path.stat().st_size):
        assert process.poll() in (None, 0), process.stderr.read().decode()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    before = output_ids(workdir)
    assert 0 < len(before) < len(PROMPTS)
    assert exit_status(decode.main, config, "--workdir", workdir) == 0, capsys.readouterr().err
    assert output_ids(workdir) == whole
    assert list(output_ids(workdir))[: len(before)] == list(before)
    # Another config is refused, as on a disk.
    assert exit_status(decode.main, config, "decode.seed=3", "--workdir", workdir) == 1
    assert "belongs to a run of another config (decode.seed: 0 there" in capsys.readouterr().err


def test_shards_in_one_bucket_are_summed_up(config, whole, bucket, capsys):
    workdir = bucket / "shards"
    assert exit_status(decode.main, config, "--workdir", workdir, "--shard=1/2") == 0
    assert "not finished yet: 0/2" in capsys.readouterr().err
    assert exit_status(decode.main, config, "--workdir", workdir, "--shard=0/2") == 0
    found = [output_ids(workdir, f"outputs.{i}-of-2.jsonl") for i in range(2)]
    assert found[0] | found[1] == whole
    assert json.loads((workdir / "results.json").read_text())["prompts"] == len(PROMPTS)


def test_weights_are_written_and_read_in_both_layouts(target, bucket, tmp_path, capsys):
    convert.run(target, bucket / "orbax", to="orbax")
    convert.run(bucket / "orbax", bucket / "hf", to="hf")
    convert.run(bucket / "hf", tmp_path / "hf", to="hf")
    stored = (target / "model.safetensors").read_bytes()
    assert (bucket / "hf" / "model.safetensors").read_bytes() == stored
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == stored
    assert {path.name for path in bucket.iterdir() if path.name.startswith(".")} == set()
    with pytest.raises(errors.CheckpointError, match="already exists"):
        convert.run(target, bucket / "hf", to="hf")
    # What another program has copied has no file of Orbax's that says it is whole.
    convert.run(target, tmp_path / "native", to="orbax")
    files.copy_tree(tmp_path / "native", bucket / "native", "config.json")
    convert.run(bucket / "native", tmp_path / "back", to="hf")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == stored


def test_only_the_rows_that_are_wanted_are_fetched(target, bucket):
    files.copy_tree(target, bucket / "rows", "config.json")
    tensors = safetensors_header.read_headers(bucket / "rows")
    tensor = tensors["model.embed_tokens.weight"]
    stored = safetensors.load_file(target / "model.safetensors")[tensor.name]
    fetched = []
    (piece,) = tensor_map.pieces(tensor.name, tensor.name, tensor.shape)
    with pytest.MonkeyPatch.context() as patch:
        read = type(bucket).read_range

        def record(self, *given):
            fetched.append(given)
            return read(self, *given)

        patch.setattr(type(bucket), "read_range", record)
        out = safetensors_io._read_box([(tensor, piece)], [(3, 7), (8, 24)], np.float32)
    np.testing.assert_array_equal(out, stored[3:7, 8:24])
    row = stored[0].nbytes
    assert fetched == [(tensor.begin + 3 * row, tensor.begin + 7 * row)]


def test_an_interrupted_writing_leaves_nothing(bucket):
    def failing():
        yield b"new"
        raise RuntimeError

    (bucket / "x").write_text("old")
    with pytest.raises(RuntimeError):
        files.write_whole(bucket / "x", failing())
    assert (bucket / "x").read_text() == "old"


def test_a_file_that_grows_is_written_at_the_end_and_now_and_then(bucket, monkeypatch):
    monkeypatch.setattr(growing, "INTERVAL_S", 0.05)
    path = bucket / "growing"
    for line in (b"one\n", b"two\n"):
        file = growing.open_file(path)
        file.append(line)
        deadline = time.monotonic() + 300
        while not path.read_bytes().endswith(line) and time.monotonic() < deadline:
            time.sleep(0.02)
        file.append(b"x")
        file.close()
        assert path.read_bytes().endswith(line + b"x")
        file = growing.open_file(path)
        file.cut(len(path.read_bytes()) - 1)
        file.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_file_that_is_cut_and_grows_to_its_old_length_is_written(bucket):
    path = bucket / "cut"
    path.write_bytes(b"one\ntw")
    with contextlib.closing(growing.open_file(path)) as file:
        file.cut(4)
        file.append(b"2\n")
    assert path.read_bytes() == b"one\n2\n"


def test_sigterm_ends_a_run_in_a_bucket_as_an_error_does(bucket):
    config = schema.DecodeRun(target=schema.TargetConfig(checkpoint="weights"))
    with (
        pytest.raises(SystemExit) as caught,
        RunDirectory(bucket / "ended", config, is_used=lambda path: False),
    ):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert loader.load(bucket / "ended" / "config.yml") == config


def test_damaged_checkpoints_are_set_aside_in_a_bucket(bucket):
    directory = bucket / "toy"
    toy.Run(directory, steps=5, checkpoint_every=2).go()
    newest = directory / "checkpoints" / "5"
    next(path for path in newest.rglob("*") if path.parent.name == "d").unlink()
    rest = toy.Run(directory, steps=6, checkpoint_every=2)
    rest.go()
    assert rest.started_at == 4
    assert "checkpoint of step 5 is damaged" in rest.notes[0]
    assert (directory / DAMAGED / "5").is_dir()


def test_a_distillation_in_a_bucket_is_that_on_a_disk(bucket, tmp_path):
    """Decoding, training and exports, killed in between; bit for bit the same."""
    path = tiny_distillation.write_config(tmp_path)
    here, there = tmp_path / "here", bucket / "there"
    options = (path, "test.tasks=[]", "--workdir")
    assert exit_status(distill.main, *options, here) == 0
    kill = functools.partial(
        tiny_distillation.kill_at, main=lambda: exit_status(distill.main, *options, there)
    )
    kill(Scheduler, "step", 12)
    kill(Checkpoints, "save", 2)  # the first one, of step 2, is whole
    assert exit_status(distill.main, *options, there) == 0
    for name in (stages.ANSWERS, "drafter/model.safetensors", "drafter/config.json"):
        assert (there / name).read_bytes() == (here / name).read_bytes(), name
    logged = read_lines(there / "training" / "metrics.jsonl")
    assert "train" in [line["kind"] for line in logged]
    assert any("tfevents" in one.name for one in (there / "training" / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gs://no-such-bucket/w", "cannot be reached: no bucket 'no-such-bucket'"),
        ("foo://b/w", "unknown kind of path; expected gs://, s3://, az:// or a plain path"),
        ("gs://", "no bucket; expected gs://BUCKET/NAME"),
    ],
)
def test_what_cannot_be_used_is_one_line(config, bucket, given, message, capsys):
    status, _, err = outcome(capsys, decode.main, config, "--workdir", given)
    assert (status, err) == (2, f"error: {given}: {message}\n")


def test_data_sets_stay_on_a_disk(config, bucket, capsys):
    given = "prompts.raw_dir=gs://shelf/raw"
    assert exit_status(decode.main, config, given) == 2
    assert capsys.readouterr().err == (
        "error: prompts.raw_dir: gs://shelf/raw: must be on a file system, not in a bucket: give "
        "a directory on a disk, or the one where the bucket is mounted\n"
    )


def test_a_library_that_is_absent_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    said = failure(paths.to_path, "gs://b/w", kind=errors.ConfigError)
    assert said == "gs://b/w: needs gcsfs; pip install 'dflash-jax[gcs]'"


def test_a_server_that_does_not_answer_ends_a_run_within_seconds():
    """In a process of its own, since the library keeps its address."""
    code = """
    import dflash.storage.buckets as b
    from dflash.cli import preflight
    b.CHECK_SECONDS = 1
    preflight.check_writable('gs://shelf/w')
    """
    settings = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    settings["STORAGE_EMULATOR_HOST"] = "http://127.0.0.1:9"
    last = run_python(code, env=os.environ | settings).stderr.splitlines()[-1]
    assert last.endswith("gs://shelf/w: cannot be reached: no answer within 1 s")
