"""The shipped training recipes, reduced in size: from decode's own output to a first evaluation."""

import json
import math
import pathlib

import pytest

from dflash import decode, train

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "train").glob("*.yml"))

# Random weights: token ids are bytes, so that no tokenizer is needed.
TARGET = (
    "target.name=qwen3",
    "target.checkpoint=random",
    "target.architecture={vocab_size: 256, hidden_size: 32, intermediate_size: 48, "
    "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, "
    "max_position_embeddings: 512, tie_word_embeddings: true, eos_token_id: [2]}",
)
TRAINING = (
    "data.length=256",
    "data.held_out_percent=20",
    "data.math_examples=50",
    "train.dtype=float32",
    "train.epochs=null",
    "train.steps=2",
    "train.batch_size=2",
    "evaluation.every=2",
    "evaluation.batches=1",
    "evaluation.prompts=2",
    "evaluation.decode={max_new_tokens: 4, batch_size: 2, page_size: 64, prefill_chunk: 64}",
)
DRAFTER = ("drafter.architecture.num_hidden_layers=1", "drafter.architecture.mask_token_id=6")
BLOCK = "loss.num_anchors=4", "drafter.architecture.block_size=4"
EAGLE3 = (
    "drafter.architecture={draft_vocab_size: 64, target_layer_ids: [0]}",
    "drafter.training_steps=2",
    "drafter.num_draft_tokens=2",
)
# Of a mixture, what is not of this run takes longer to make than to learn.
MIXTURE = "data.mixture={jsonl: 0.7, math: 0.3, code: 0, chat: 0}"
REDUCED = {
    "qwen3_4b_dflash": (*DRAFTER, *BLOCK, "drafter.architecture.target_layer_ids=[0]"),
    "qwen3_4b_eagle3": EAGLE3,
    "tiny_dflash": (*DRAFTER, *BLOCK, MIXTURE, "drafter.architecture.num_target_features=1"),
    "tiny_dflash2": (*DRAFTER, *BLOCK, MIXTURE, "drafter.architecture.num_target_features=1"),
    "tiny_dspark": (*DRAFTER, *BLOCK, MIXTURE, "drafter.architecture.num_target_features=1"),
    "tiny_eagle3": (*EAGLE3, MIXTURE),
    "tiny_medusa": (MIXTURE, "loss.num_anchors=4", "drafter.architecture.block_size=4"),
    "tiny_target": (MIXTURE, "tokenizer=null"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> pathlib.Path:
    """outputs.jsonl of a decode run over 24 questions, made as the docs say."""
    directory = tmp_path_factory.mktemp("answers")
    lines = [json.dumps({"prompt": f"Count from {n} to {n + 9}."}) for n in range(24)]
    (directory / "questions.jsonl").write_text("\n".join(lines))
    arguments = (
        "configs/qwen3_4b_dflash.yml",
        *TARGET,
        "drafter.name=none",
        "prompts.text=[]",
        f"prompts.file={directory / 'questions.jsonl'}",
        "decode.batch_size=8",
        "decode.max_new_tokens=8",
        "dtype=float32",
        "--nostream",
    )
    assert run(decode, *arguments, "--workdir", directory / "run") == 0
    return directory / "run" / "outputs.jsonl"


def run(command, *arguments) -> int:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as caught:
        command.main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_on_what_decode_wrote(answers, tmp_path, recipe):
    arguments = (
        f"configs/train/{recipe}.yml",
        *TARGET,
        *TRAINING,
        *REDUCED[recipe],
        f"data.files={answers}",
        f"data.data_dir={answers.parent / 'data'}",
    )
    assert run(train, *arguments, "--workdir", tmp_path) == 0
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    (found,) = [line for line in lines if line["kind"] == "evaluation"]
    assert math.isfinite(found["loss"])
    if recipe != "tiny_target":
        assert found["tau"] >= 1
        assert "tau/jsonl" in found
    assert (tmp_path / "hf" / "model.safetensors").exists()
