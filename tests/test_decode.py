"""The decode command as a user runs it: checkpoints and prompts in, files and errors out."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml
from support import exit_status, outcome, read_lines, write_lines
from support.golden import GOLDEN, golden
from support.models import make_target

from dflash import decode
from dflash.checkpoints import checkpoint
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import DFlashArchitecture
from dflash.parallel import parameters

CONFIG = """
target: {{checkpoint: {models}/target}}
drafter: {{name: dflash, checkpoint: {models}/draft}}
decode: {{max_new_tokens: 20, ignore_eos: true, page_size: 16, prefill_chunk: 16,
  partial_dispatches: false}}
prompts: {{file: prompts.jsonl}}
dtype: float32
"""
PROMPTS = [[1, 2, 3], [5], list(range(12)) * 2, [7, 7], [4, 3, 2, 1]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints of a tiny target and of a drafter for it: V 12, two layers and one, block 8."""
    directory = tmp_path_factory.mktemp("models")
    target = make_target(vocab_size=12, num_hidden_layers=2)
    options = DFlashArchitecture(num_hidden_layers=1, block_size=8, target_layer_ids=(0, 1))
    shape = DFlash.architecture_for(target.arch, options)
    drafter = DFlash(shape, dtype=target.dtype, sharding=target.sharding)
    parameters.initialize(drafter, jax.random.key(1))
    checkpoint.save(target, directory / "target", target.config_to_hf(target.arch))
    checkpoint.save(drafter, directory / "draft", drafter.config_to_hf(shape))
    return directory


def prepare(directory, models):
    """Writes a config and prompts."""
    (directory / "c.yml").write_text(CONFIG.format(models=models))
    write_prompts(directory / "prompts.jsonl", PROMPTS)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, models):
    """Runs the command in a fresh directory; returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, models)
    return functools.partial(outcome, capsys, decode.main, "c.yml")


WITH_BASELINE = "--workdir=w", "decode.baseline=true", "decode.batch_size=2"


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """The work directory of a run with its baseline, once for all tests."""
    directory = tmp_path_factory.mktemp("finished")
    prepare(directory, models)
    with contextlib.chdir(directory):
        assert exit_status(decode.main, "c.yml", *WITH_BASELINE) == 0
    return directory / "w"


def write_prompts(path, prompts):
    write_lines(path, [{"prompt_ids": ids} for ids in prompts])


def read(path):
    return pathlib.Path(path).read_text()


def read_outputs(workdir="w", name="outputs"):
    return read_lines(pathlib.Path(workdir, f"{name}.jsonl"))


def output_ids(workdir):
    return {record["index"]: record["output_ids"] for record in read_outputs(workdir)}


def test_golden_checkpoint_from_the_command_line(run, tmp_path):
    vectors, case = golden("qwen3_v12"), GOLDEN / "qwen3_v12"
    prompt = vectors["input_ids"].tolist()
    write_prompts(tmp_path / "prompts.jsonl", [prompt])
    new = vectors["output_ids"].tolist()[len(prompt) :]
    status, out, err = run(
        "--workdir=w",
        f"decode.max_new_tokens={len(new)}",
        f"target.checkpoint={case / 'target'}",
        f"drafter.checkpoint={case / 'draft'}",
    )
    assert status == 0, err
    (record,) = read_outputs()
    assert record["output_ids"] == new
    assert record["finish_reason"] == "length"
    cycles = len(record["acceptance_lengths"])
    assert record["acceptance_lengths"][:-1] == vectors["acceptance_lengths"].tolist()[: cycles - 1]
    assert sum(record["acceptance_lengths"]) == len(new) - 1
    assert record["tau"] == pytest.approx(np.mean(record["acceptance_lengths"]))
    assert record["prefill_ms"] > 0
    assert record["decode_ms"] > 0
    assert out == "".join(f"⟨{token}⟩" for token in new) + "\n"


def test_workdir_holds_outputs_results_and_config(finished):
    outputs = read_outputs(finished)
    assert sorted(record["index"] for record in outputs) == list(range(len(PROMPTS)))
    assert [r["prompt_ids"] for r in sorted(outputs, key=lambda r: r["index"])] == PROMPTS
    results = json.loads(read(finished / "results.json"))
    lengths = [n for record in outputs for n in record["acceptance_lengths"]]
    assert results["tau"] == pytest.approx(np.mean(lengths))
    assert results["cycles"] == len(lengths)
    assert sum(results["acceptance_histogram"].values()) == len(lengths)
    for key in ("tokens_per_second", "ttft_ms", "tpot_ms"):
        assert results[key] > 0
    assert {"jax", "dflash"} <= set(results["versions"])
    assert results["devices"] == ["cpu:cpu"]
    assert exit_status(decode.main, finished / "config.yml", "--print_config") == 0


def test_baseline_is_decoded_beside_the_run_and_resumed_like_it(run):
    status, out, err = run("--workdir=w", "decode.baseline=true")
    assert status == 0, err
    ends = [line.split()[-1:] for line in err.splitlines()]  # A slow run ends with advice.
    assert [end for end in ends if end in (["yes"], ["no"])] == [["yes"]] * 6
    plain = {record["index"]: record for record in read_outputs(name="baseline")}
    drafted = {record["index"]: record for record in read_outputs()}
    for index, record in drafted.items():
        assert plain[index]["output_ids"] == record["output_ids"]
        assert set(plain[index]["acceptance_lengths"]) == {1}
    compared = json.loads(read("w/results.json"))["baseline"]
    assert (compared["identical"], compared["prompts"]) == (5, 5)
    assert compared["speed_up"] > 0
    lines = read("w/baseline.jsonl").splitlines(keepends=True)
    pathlib.Path("w/baseline.jsonl").write_text("".join(lines[:3]))
    status, out, _ = run("--workdir=w", "decode.baseline=true")
    assert (status, out) == (0, "")  # nothing but the baseline was left to do
    assert read("w/baseline.jsonl").startswith("".join(lines[:3]))
    assert len(read("w/baseline.jsonl").splitlines()) == len(PROMPTS)


def test_a_difference_from_plain_decoding_is_explained(run, finished):
    """A token of a finished prompt is changed in the work directory, as a fault would change it."""
    shutil.copytree(finished, "w")
    record, *others, _ = read_outputs(name="baseline")
    drafted = record["output_ids"][-1]
    record["output_ids"][-1] = (drafted + 1) % 256
    write_lines(pathlib.Path("w/baseline.jsonl"), [record, *others])
    status, _, err = run(*WITH_BASELINE)
    number, place = record["index"], len(record["output_ids"])
    wanted = (
        f"prompt {number}: token {place} is {drafted}, plain decoding has {(drafted + 1) % 256}"
    )
    assert status == 1
    assert f"{wanted}: a fault: " in err.splitlines()[-1]
    assert "please report it" in err.splitlines()[-1]
    results = json.loads(read("w/results.json"))
    (told,) = results["baseline"]["differences"]
    assert told.startswith(wanted)
    _, _, err = run(*WITH_BASELINE)
    assert told in err, "a later start shows less than the first"
    assert json.loads(read("w/results.json")) == results


def test_rerun_skips_what_is_done_and_refuses_another_config(run):
    assert run("--workdir=w")[0] == 0
    whole = output_ids("w")
    lines = read("w/outputs.jsonl").splitlines(keepends=True)
    cut = "".join(lines[:2]) + lines[2][:25]  # killed inside a line
    pathlib.Path("w/outputs.jsonl").write_text(cut)
    status, out, err = run("--workdir=w")
    assert status == 0, err
    assert read("w/outputs.jsonl").startswith("".join(lines[:2]))
    assert output_ids("w") == whole
    before = read("w/outputs.jsonl")
    status, out, err = run("--workdir=w")
    assert (status, out) == (0, "")
    assert err.startswith("nothing left to do: all prompts were finished before\n")
    assert read("w/outputs.jsonl") == before
    status, _, err = run("--workdir=w", "decode.seed=5")
    assert status == 1
    assert err == (
        "error: w: belongs to a run of another config (decode.seed: 0 there, 5 here): "
        "use another --workdir, or delete this one\n"
    )


def test_dry_run_allocates_and_writes_nothing(run):
    status, out, _ = run("--dry_run", "--workdir=w", "mesh.tensor=1", "decode.batch_size=4")
    assert status == 0
    assert "mesh         data 1 × fsdp 1 × tensor 1 × expert 1 = 1 device" in out
    assert "target weights" in out
    assert "generate" in out
    assert not os.path.exists("w")


def test_the_strategy_is_that_of_the_drafters_checkpoint(capsys):
    case = GOLDEN / "qwen3_b1"
    argv = [case / "target", f"drafter.checkpoint={case / 'draft'}", "--print_config"]
    status, out, _ = outcome(capsys, decode.main, *argv)
    assert (status, yaml.safe_load(out)["drafter"]["name"]) == (0, "dflash")


def environment():
    return os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def test_kill_loses_no_finished_prompt(run):
    """SIGKILL amid a run, then the same command: every prompt once, the same ids."""
    assert run("--workdir=whole")[0] == 0
    command = [sys.executable, "-m", "dflash.decode", "c.yml", "--workdir=killed"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    deadline = time.time() + 300
    path = "killed/outputs.jsonl"
    while time.time() < deadline and not (os.path.exists(path) and os.path.getsize(path)):
        assert process.poll() in (None, 0), process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    status, _, err = run("--workdir=killed")
    assert status == 0, err
    assert output_ids("killed") == output_ids("whole")


def test_an_interrupt_does_not_wait_for_the_compiler(run):
    command = [sys.executable, "-m", "dflash.decode", "c.yml", "--compilation_cache=off"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    printed = ""
    while "programs" not in printed and process.poll() is None:
        printed += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    printed += process.communicate()[1]
    assert (process.returncode, printed.splitlines()[-1]) == (130, "interrupted"), printed


def test_shards_decode_what_one_run_does(run, tmp_path):
    """Each is a run of its own; the last one sums up, and so does a later command."""
    sampled = "decode.temperature=0.9", "decode.seed=3", "decode.baseline=true"
    assert run("--workdir=whole", *sampled)[0] == 0
    status, _, err = run("--workdir=w", "--shard=2/3", *sampled)
    assert (status, err.splitlines()[-1]) == (0, "shard 2/3 is done; not finished yet: 0/3, 1/3")
    status, _, err = run("--workdir=w", *sampled)
    assert (status, err) == (
        1,
        "error: w: not all shards have finished: 0/3, 1/3: run each of these with --shard\n",
    )
    for other, message in (
        (("--shard=0/3", "decode.seed=4"), "error: w: belongs to a run of another config (decode."),
        (("--shard=0/2", *sampled), "error: w: is divided into 3 shards, not 2: continue with"),
        (("--shard=3/3", *sampled), "error: --shard=3/3: shard 3 of 3 is out of range"),
    ):
        status, _, err = run("--workdir=w", *other)
        assert status in (1, 2)
        assert err.startswith(message)
    status, _, err = run("--workdir=whole", "--shard=0/3", *sampled)
    assert err.startswith("error: whole/outputs.jsonl: belongs to a run without --shard: continue")
    for shard in ("0/3", "1/3"):
        assert run("--workdir=w", f"--shard={shard}", *sampled)[0] == 0

    def lines(directory, names):
        found = [one for path in directory.glob(names) for one in read_lines(path)]
        kept = ("prompt_ids", "output_ids", "text", "acceptance_lengths")
        return {one["index"]: [one[key] for key in kept] for one in found}

    for name in ("outputs", "baseline"):
        whole = lines(tmp_path / "whole", f"{name}.jsonl")
        assert lines(tmp_path / "w", f"{name}*.jsonl") == whole
        assert len(whole) == len(PROMPTS)
    summed = (tmp_path / "w" / "results.json").read_text()
    results, wanted = json.loads(summed), json.loads((tmp_path / "whole/results.json").read_text())
    for key in ("tau", "prompts", "output_tokens", "acceptance_histogram", "config_hash"):
        assert results[key] == wanted[key]
    (tmp_path / "w" / "results.json").unlink()
    assert run("--workdir=w", *sampled)[0] == 0
    assert (tmp_path / "w" / "results.json").read_text() == summed
