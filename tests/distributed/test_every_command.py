"""Four processes give what one gives, in every command that they can run."""

import importlib
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors
from support import SUPPORT, tiny_distillation
from support.models import BYTE_TARGET

from dflash import benchmark, decode, distill, train
from dflash.cli import subcommand as cli
from dflash.distillation import stages
from dflash.training.checkpoints import Checkpoints

TIMEOUT_S = 1800
COUNT = 4
MODELS = f"""
target: {BYTE_TARGET}
drafter:
  name: dflash
  checkpoint: random
  architecture: {{num_hidden_layers: 1, block_size: 4, num_attention_heads: 4,
    num_key_value_heads: 2, head_dim: 16, intermediate_size: 48, target_layer_ids: [0]}}
dtype: float32
"""
DECODE = f"""{MODELS}
prompts: {{file: DIRECTORY/prompts.jsonl}}
decode: {{max_new_tokens: 9, page_size: 16, prefill_chunk: 32, batch_size: 4, temperature: 0.8}}
"""
BENCHMARK = f"""{MODELS}
strategies: {{dflash: }}
tasks: [spec-bench]
raw_dir: DIRECTORY/raw
prompts_per_task: 4
rounds: 1
replay_tokens: 0
decode: {{max_new_tokens: 9, sync_every: 4, page_size: 16, prefill_chunk: 64, batch_size: 4}}
"""
TRAIN = f"""
task: target
target: {BYTE_TARGET}
data: {{files: [DIRECTORY/text.jsonl], data_dir: DIRECTORY/data, length: 32, held_out_percent: 0}}
train: {{steps: 4, batch_size: 8, dtype: float32, log_every: 1, checkpoint_every: 2,
  export_dtype: float32}}
evaluation: {{every: 100, batches: 0, prompts: 0}}
"""


def prepare(directory) -> None:
    """Configs, prompts, questions and something to train on."""
    for name, text in (("c", DECODE), ("b", BENCHMARK), ("t", TRAIN)):
        (directory / f"{name}.yml").write_text(text.replace("DIRECTORY", str(directory)))
    write(directory / "prompts.jsonl", [{"prompt": f"What is {i}?"} for i in range(6)])
    questions = directory / "raw" / "spec_bench" / "question.jsonl"
    questions.parent.mkdir(parents=True)
    write(questions, [{"turns": [f"Which of the two is larger, {i} or 5?"]} for i in range(4)])
    lines = [{"prompt": f"{i} and {i + 1}", "response": f"is {2 * i + 1}"} for i in range(80)]
    write(directory / "text.jsonl", lines)
    tiny_distillation.write_config(directory)


def write(path, lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process makes of each command."""
    directory = tmp_path_factory.mktemp("one")
    prepare(directory)
    workdir = directory / "decode"
    decode._decode(cli.parse(decode.SUBCOMMAND, directory / "c.yml", workdir=workdir, stream=False))
    benchmark.run(directory / "b.yml", workdir=directory / "benchmark")
    train.run(directory / "t.yml", workdir=directory / "train")
    command = distill.SUBCOMMAND, directory / "config.yml", *tiny_distillation.ROWS_FOR_FOUR
    assert distill._distill(cli.parse(*command, workdir=directory / "distill")) == 0
    return directory


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """What several processes make of them."""
    directory = tmp_path_factory.mktemp("several")
    prepare(directory)
    command = [sys.executable, SUPPORT / "every_command.py", directory, str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert [end and end[0] for end in ends] == [0] * COUNT, ends
    return directory


def outputs(path) -> dict[int, list[int]]:
    return {line["index"]: line["output_ids"] for line in read(path)}


def check_weights(one, several, path) -> None:
    found, wanted = (
        safetensors.load_file(place / path / "model.safetensors") for place in (several, one)
    )
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=2e-5, err_msg=name)


def test_decode(one, several):
    wanted = outputs(one / "decode" / "outputs.jsonl")
    assert len(wanted) == 6
    assert outputs(several / "decode" / "outputs.0-of-1.jsonl") == wanted
    assert json.loads((several / "decode" / "results.json").read_text())["prompts"] == 6


def test_benchmark(one, several):
    figures = ("task", "strategy", "prompts", "output_tokens", "tau", "identical_share")
    found, wanted = (
        [
            {name: cell[name] for name in figures}
            for cell in json.loads((place / "benchmark" / "results.json").read_text())["cells"]
        ]
        for place in (several, one)
    )
    assert found == wanted
    assert (several / "benchmark" / "results.csv").exists()


def test_train(one, several):
    found, wanted = (
        [line["loss"] for line in read(place / "train" / "metrics.jsonl")]
        for place in (several, one)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    check_weights(one, several, "train/hf")


def test_distill(one, several):
    found, wanted = ((place / "distill" / stages.ANSWERS).read_text() for place in (several, one))
    assert found == wanted
    trained = [
        json.loads((place / "distill" / stages.TRAINED).read_text()) for place in (several, one)
    ]
    for values in trained:
        assert values.pop("step_seconds") > 0
    assert trained[0] == trained[1]
    found, wanted = (
        json.loads((place / "distill" / stages.TESTED).read_text())["math"]
        for place in (several, one)
    )
    assert (found["tau"], found["prompts"]) == (wanted["tau"], 2)
    assert found["baseline"]["identical"] == 2
    check_weights(one, several, f"distill/{stages.DRAFTER}")


@pytest.mark.parametrize("devices", [1, 8])
def test_another_number_of_devices_reads_their_checkpoints(several, tmp_path, devices, monkeypatch):
    shutil.copytree(several / "train", tmp_path / "train")
    restored = []
    restore = Checkpoints.restore

    def watched(self, like, note):
        found = restore(self, like, note)
        restored.append((found.step, num_devices(found.state.params)))
        return found

    monkeypatch.setattr(Checkpoints, "restore", watched)
    done = train.run(several / "t.yml", f"mesh.fsdp={devices}", workdir=tmp_path / "train")
    assert (done.step, done.finished) == (4, True)
    assert restored == [(4, devices)]


def num_devices(tree) -> int:
    """Over which its arrays are placed."""
    return len(set().union(*(one.sharding.device_set for one in jax.tree.leaves(tree))))


@pytest.mark.parametrize(
    ("name", "more"),
    [("sweep", "; divide it with --shard"), ("convert", ""), ("chat", ""), ("compile", "")],
)
def test_a_command_of_one_process_says_so(capsys, name, more):
    command = importlib.import_module(f"dflash.{name}")
    with pytest.raises(SystemExit) as end:
        command.main(["s.yml", "--coordinator_address=auto"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: --coordinator_address: dflash {name} runs in one process{more}"
