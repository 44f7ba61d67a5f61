"""`python -m dflash.train` on real models, small: every way to start, to end and to be refused."""

import functools
import json
import pathlib
import shutil
import string

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import examples, exit_status, read_lines, write_lines

from dflash import train
from dflash.checkpoints import checkpoint

run = functools.partial(exit_status, train.main)

SHAPE = {
    "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": [2],
}  # fmt: skip
CONFIG = """
target: {{name: qwen3, checkpoint: random, architecture: {shape}}}
tokenizer: {tokenizer}
data: {{files: [{file}], held_out_percent: 20, length: 64, data_dir: {data_dir}}}
loss: {{num_anchors: 8}}
optimizer: {{learning_rate: 3e-3}}
train: {{steps: 6, dtype: float32, log_every: 2, checkpoint_every: 3, export_dtype: float32}}
evaluation: {{every: 100, batches: 0, prompts: 0,
  decode: {{max_new_tokens: 16, page_size: 16, prefill_chunk: 16, batch_size: 4}}}}
"""
TARGET = ("task=target",)
SHALLOW = (*TARGET, "target.architecture.num_hidden_layers=1")  # Compiles sooner.
DRAFTER = (
    "drafter.name=dflash", "drafter.checkpoint=random", "drafter.architecture.num_hidden_layers=1",
    "drafter.architecture.block_size=4", "drafter.architecture.num_attention_heads=4",
    "drafter.architecture.num_key_value_heads=2", "drafter.architecture.head_dim=16",
    "drafter.architecture.intermediate_size=64", "drafter.architecture.target_layer_ids=[0, 1]",
)  # fmt: skip


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Conversations whose answers follow from their first letter."""
    directory = tmp_path_factory.mktemp("data")
    letters = string.ascii_lowercase * 3
    starts = [(number, number % 26) for number in range(120)]
    lines = [
        {"prompt": f"{number}{letters[start]}", "response": letters[start : start + 24]}
        for number, start in starts
    ]
    write_lines(directory / "alphabet.jsonl", lines)
    (directory / "tokenizer").mkdir()
    for name in ("tokenizer.model", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(examples.PROMPTS.parent / "tiny_target" / name, directory / "tokenizer")
    return directory


@pytest.fixture
def config(data, tmp_path):
    """A config file."""
    files = {"tokenizer": data / "tokenizer", "file": data / "alphabet.jsonl"}
    path = tmp_path / "config.yml"
    path.write_text(CONFIG.format(shape=json.dumps(SHAPE), data_dir=data / "d", **files))
    return path


def final_state(workdir: pathlib.Path, step: int) -> dict[str, int]:
    """Checksums of everything in a checkpoint."""
    facts = json.loads((workdir / "checkpoints" / str(step) / "facts" / "metadata").read_text())
    return facts["checksums"]


def weights(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


def losses(workdir: pathlib.Path, kind: str = "train") -> list[float]:
    return metrics(workdir, kind, "loss")


def metrics(workdir: pathlib.Path, kind: str, name: str) -> list[float]:
    return [line[name] for line in read_lines(workdir / "metrics.jsonl") if line["kind"] == kind]


@pytest.mark.parametrize("task", [TARGET, DRAFTER], ids=["target", "drafter"])
def test_continuing_from_a_checkpoint_gives_the_same_bits(config, tmp_path, task, capsys):
    """Of weights that load; the state of a drafter's run holds nothing of the target's."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    assert run(config, *task, "--workdir", whole) == 0
    assert "done: " in capsys.readouterr().err
    assert checkpoint.read_config(whole / "hf")["torch_dtype"] == "float32"
    stored, state = weights(whole / "hf"), final_state(whole, 6)
    assert all(np.isfinite(array).all() for array in stored.values())
    of_target = [name for name in state if "embed_tokens" in name or "lm_head" in name]
    assert bool(of_target) == (task is TARGET)
    # The same from Python, with nothing left to do.
    again = train.run(config, *task, workdir=whole)
    assert (again.weights, again.step, again.finished) == (whole / "hf", 6, True)
    shutil.copytree(whole, rest)
    shutil.rmtree(rest / "checkpoints" / "6")
    shutil.rmtree(rest / "hf")
    assert run(config, *task, "--workdir", rest) == 0
    assert final_state(rest, 6) == state
    for name, array in stored.items():
        np.testing.assert_array_equal(weights(rest / "hf")[name], array)
    assert losses(rest) == losses(whole)
    assert len(losses(rest)) == 3


def test_kept_features_train_the_same_drafter_without_the_target(config, tmp_path, monkeypatch):
    """Two epochs; then another run over the same files, of which one is cut and one is lost."""
    monkeypatch.chdir(tmp_path)
    options = *DRAFTER, "loss.name=kl", "train.epochs=2", "train.steps=null", "train.batch_size=4"
    assert run(config, *options, "--workdir", "plain") == 0
    kept = *options, "train.keep_features=kept"
    assert run(config, *kept, "--workdir", "kept_run") == 0
    files = sorted(path for path in (tmp_path / "kept").rglob("*") if path.is_file())
    sizes = {path.stat().st_size for path in files}
    assert sizes == {64 * 3 * SHAPE["hidden_size"] * 4}  # two layers and the last, of 64 tokens
    files[0].write_bytes(b"cut")
    files[1].unlink()
    before = {path: path.stat().st_mtime_ns for path in files[2:]}
    assert run(config, *kept, "--workdir", "again") == 0
    assert {path.stat().st_size for path in files} == sizes
    rewritten = [path for path in before if path.stat().st_mtime_ns != before[path]]
    assert len(rewritten) <= 6  # the other rows of two batches
    for name in ("kept_run", "again"):
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "plain"), rtol=1e-5)


def test_other_precisions_pieces_and_meshes_learn_the_same(config, tmp_path):
    variants = {
        "plain": (),
        "pieces": ("optimizer.accumulate_steps=2", "train.remat=true"),
        "sharded": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
        "bfloat16": ("train.dtype=bfloat16",),
    }
    for name, options in variants.items():
        arguments = [*TARGET, *options, "--workdir", tmp_path / name]
        assert run(config, *arguments) == 0
    plain = losses(tmp_path / "plain")
    for name in variants:
        rtol = 2e-2 if name == "bfloat16" else 1e-4
        np.testing.assert_allclose(losses(tmp_path / name), plain, rtol=rtol, err_msg=name)


def test_a_sharded_drafter_learns_as_on_one_device(config, tmp_path):
    # A single slot, where there are four replicas.
    judged = "evaluation.every=6", "evaluation.prompts=2", "evaluation.decode.batch_size=1"
    assert run(config, *DRAFTER, *judged, "--workdir", tmp_path / "one") == 0
    mesh = "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"
    assert run(config, *DRAFTER, *judged, *mesh, "--workdir", tmp_path / "eight") == 0
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(tmp_path / "one"), rtol=1e-4)
    (one,), (eight,) = (metrics(tmp_path / name, "evaluation", "tau") for name in ("one", "eight"))
    assert one == eight


def test_target_then_drafter_then_tau(config, data, tmp_path, capsys):
    """A target from scratch, a drafter against it, and τ as decode itself measures it."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    long = "train.steps=120", "train.checkpoint_every=100", "optimizer.learning_rate=1e-2"
    assert run(config, *TARGET, *long, "--workdir", target) == 0
    against = (
        f"target.checkpoint={target / 'hf'}", "target.architecture=null", "target.name=null",
        "tokenizer=null", "evaluation.every=60", "evaluation.batches=1", "evaluation.prompts=4",
    )  # fmt: skip
    assert run(config, *DRAFTER, *against, *long, "--workdir", drafter) == 0
    assert metrics(drafter, "evaluation", "step") == [60, 120]
    assert metrics(drafter, "evaluation", "tau")[-1] > 2.5  # of at most 4
    assert losses(drafter, "evaluation")[-1] < losses(drafter)[0]
    assert "τ/jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(("task", "learner"), [(TARGET, "target"), (DRAFTER, "drafter")])
def test_a_checkpoint_is_where_training_may_start(task, learner, config, tmp_path):
    """Also where a training goes on whose work directory is gone."""
    assert run(config, *task, "train.steps=40", "--workdir", tmp_path / "first") == 0
    start = f"{learner}.checkpoint={tmp_path / 'first' / 'hf'}"
    assert run(config, *task, start, "--workdir", tmp_path / "second") == 0
    assert losses(tmp_path / "second")[0] < 0.9 * losses(tmp_path / "first")[0]


REFUSED = {
    "nothing to train": ((), "drafter.name: 'none' has no weights to train"),
    "length": ((*TARGET, "data.length=1024"), "data.length: 1024, but the target was made for 512"),
    "vocabulary": ((*TARGET, "target.architecture.vocab_size=200"), "200"),
    "too few rows": ((*TARGET, "train.batch_size=4096"), "but a batch has 4096"),
    "nothing held out": ((*TARGET, "evaluation.batches=1", "data.held_out_percent=0"),
                         "no examples in its split validation: raise data.held_out_percent=0"),
    "too little held out": (
        (*TARGET, "evaluation.batches=1", "data.held_out_percent=3", "mesh.data=8"),
        "data.held_out_percent: 3 leaves ",
    ),
    "features": ((*TARGET, "train.keep_features=kept"), "only drafters are trained on a target's"),
    "steps twice": ((*TARGET, "train.epochs=1"), "exactly one of train.steps and train.epochs"),
    "pieces": ((*TARGET, "optimizer.accumulate_steps=3"), "train.batch_size: 8 does not divide"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line(config, tmp_path, case, capsys):
    arguments, message = REFUSED[case]
    assert run(config, *arguments, "--workdir", tmp_path / "run") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert message in line


def test_a_dry_run_plans_and_leaves_nothing(config, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert run(config, *DRAFTER, "mesh.data=4", "--dry_run", "--workdir", workdir) == 0
    plan = capsys.readouterr().out
    assert "mesh         data 4 × fsdp 1 × tensor 1 × expert 1 = 4 devices" in plan
    assert "duration     6 steps of 8 × 64 tokens = 3,072 tokens" in plan
    assert "frozen target (float32)" in plan
    assert not workdir.exists()


def test_the_4b_recipe_plans_in_full(capsys):
    """`test_recipes.py` trains it in small."""
    assert run("configs/train/qwen3_4b_dflash.yml", "mesh.fsdp=8", "--dry_run") == 0
    plan = capsys.readouterr().out
    assert "learning 537,427,200, frozen target 4,022,468,096" in plan


EAGLE3 = (
    "drafter.name=eagle3", "drafter.checkpoint=random", "drafter.num_draft_tokens=3",
    "drafter.training_steps=3", "drafter.architecture.draft_vocab_size=64",
    "drafter.architecture.target_layer_ids=[0, 1]", "loss.name=kl",
)  # fmt: skip


def test_a_draft_vocabulary_is_chosen_once_and_stays(config, tmp_path):
    """Tokens are chosen by their counts as labels; resumed and continued runs keep the choice."""
    workdir = tmp_path / "run"
    assert run(config, *EAGLE3, "--workdir", workdir) == 0
    stored = weights(workdir / "hf")
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (np.int64, np.bool_)
    chosen = np.arange(64) + stored["d2t"]
    np.testing.assert_array_equal(chosen, np.flatnonzero(stored["t2d"]))
    # The answers are letters in their order, and end with token 2.
    assert 2 in chosen
    assert not np.array_equal(chosen, np.arange(64)), "the first tokens are not the frequent ones"

    shutil.rmtree(workdir / "checkpoints" / "6")
    shutil.rmtree(workdir / "hf")
    assert run(config, *EAGLE3, "--workdir", workdir) == 0
    again = weights(workdir / "hf")
    assert again.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(again[name], array)

    onward = (
        "drafter.name=eagle3", f"drafter.checkpoint={workdir / 'hf'}",
        "drafter.tree={budget: 4, top_k: 2, depth: 2}", "loss.name=kl", "train.steps=1",
        "evaluation.every=1", "evaluation.prompts=2",
    )  # fmt: skip
    assert run(config, *onward, "--workdir", tmp_path / "onward") == 0
    (tau,) = metrics(tmp_path / "onward", "evaluation", "tau")
    assert 1 <= tau <= 3
    after = weights(tmp_path / "onward" / "hf")
    np.testing.assert_array_equal(after["d2t"], stored["d2t"])
    assert not np.array_equal(after["fc.weight"], stored["fc.weight"])


@pytest.mark.parametrize("defect", ["are empty", "do not end with an end token", "end in a loop"])
def test_defects_of_the_answers_are_told_before_the_first_step(config, tmp_path, capfd, defect):
    outputs = {"are empty": [2], "do not end with an end token": [5, 6, 7]}
    output_ids = outputs.get(defect, [9] * 40 + [2])
    lines = [{"prompt_ids": [7, number], "output_ids": output_ids} for number in range(60)]
    path = write_lines(tmp_path / "outputs.jsonl", lines)
    length = "train.steps=1", "train.batch_size=1", "data.held_out_percent=0"
    files = f"data.files=[{path}]"
    assert run(config, *SHALLOW, files, *length, "--workdir", tmp_path / "w") == 0
    told = capfd.readouterr().err
    assert "jsonl/train: tokens per answer, of 60 answers: 10 % up to" in told
    assert told.index(f"warning: 100 % of the answers {defect}: ") < told.index("step 1/1")
