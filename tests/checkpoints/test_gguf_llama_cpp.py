"""Vocabularies of llama.cpp, and tiny models that its own converter writes and it decodes."""

import json
import shutil
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from support import gguf_files, llama_cpp
from support.golden import import_transformers
from support.trained_tokenizers import TEXTS, train_byte_level, train_sentencepiece, write_json

import dflash
from dflash.checkpoints import checkpoint
from dflash.checkpoints.gguf import file_header, tokenizer_files
from dflash.text.tokenizer_loading import load_tokenizer

VOCABULARIES = [
    *("deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe"),
    *("llama-spm", "phi-3", "qwen2", "qwen35"),
]
SEPARATOR = "\n__ggml_vocab_test__\n"
# Sizes that files, or llama.cpp, cannot state otherwise.
DELTA = {"linear_value_head_dim": 8, "num_hidden_layers": 4, "full_attention_interval": 4}
SECTIONED = DELTA | {"head_dim": 32}  # The converter's default sections take 32 dimensions.
WINDOWS = {"num_hidden_layers": 6, "layer_types": (*("sliding_attention",) * 5, "full_attention")}
# Family and sizes by llama.cpp's name of the architecture.
CASES = {
    "llama": ("llama3", {}),
    "gemma3": ("gemma3_text", WINDOWS | {"final_logit_softcapping": 5.0}),
    "qwen2": ("qwen2", {"head_dim": 8}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {}),
    "smollm3": ("smollm3", {}),
    "gpt-oss": ("gpt_oss", {}),
    "qwen3next": ("qwen3_next", DELTA),
    "qwen35": ("qwen3_5_text", SECTIONED),
    "qwen35moe": ("qwen3_5_text", SECTIONED | gguf_files.EXPERTS),
}
SENTENCEPIECE = {"llama": True, "gemma3": False}  # Whether it adds a space before texts.
PROMPT = [*range(40, 60)]  # Longer than the windows.
# Names the pre-tokenizer of a trained tokenizer, which the converter knows by a hash of ids.
CONVERTER = """
import runpy, sys
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def vocabularies():
    return llama_cpp.files("models", "")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_of_the_vocabulary(tmp_path, vocabularies, name):
    file = tmp_path / "x.gguf"
    file.write_bytes(vocabularies[f"ggml-vocab-{name}.gguf"])
    for path, content in tokenizer_files.of_file(file_header.read_header(file)).files().items():
        (tmp_path / path).write_bytes(content)
    tokenizer = load_tokenizer(tmp_path)
    texts, lines = (
        vocabularies[f"ggml-vocab-{name}.gguf.{ending}"].decode() for ending in ("inp", "out")
    )
    texts = texts.removesuffix(SEPARATOR).split(SEPARATOR)
    for text, line in zip(texts, lines.splitlines(), strict=True):
        ids = tokenizer.encode(text, special_tokens=True, add_special_tokens=False)
        # Qwen's tokenizer.json composes characters, which llama.cpp does not.
        composed = unicodedata.normalize("NFC", text)
        assert ids == [int(token) for token in line.split()] or composed != text


@pytest.fixture(scope="module")
def converter(tmp_path_factory):
    import_transformers()
    pytest.importorskip("xllamacpp", reason="pip install 'dflash-jax[parity]'")
    directory = tmp_path_factory.mktemp("llama.cpp")
    for folder in ("", "conversion", "gguf-py/gguf"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
        for name, content in llama_cpp.files(folder, ".py").items():
            (directory / folder / name).write_bytes(content)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_a_converted_model_is_its_source(tmp_path, converter, name):
    """So are its tokens, and llama.cpp decodes it as we do."""
    source, file, words = (tmp_path / name for name in ("m", "m.gguf", "words"))
    words.mkdir()
    if name in SENTENCEPIECE:
        train_sentencepiece(words, add_dummy_prefix=SENTENCEPIECE[name])
        config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    else:
        train_byte_level(words)
        config = {"eos_token": "<|im_end|>"}
    write_json(words / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend"} | config)
    family, sizes = CASES[name]
    # Gemma's converter drops rows beyond the tokenizer.
    rows = load_tokenizer(words).vocab_size if name == "gemma3" else 384
    kind, arch = gguf_files.make_model(source, family, vocab_size=rows, **sizes)
    shutil.copytree(words, source, dirs_exist_ok=True)
    command = [sys.executable, "-c", CONVERTER, str(converter / "convert_hf_to_gguf.py")]
    command += [str(source), f"--outfile={file}", "--outtype=f32"]
    command += ["--no-mtp"] if DELTA.items() <= sizes.items() else []
    path = {"PYTHONPATH": f"{converter}:{converter / 'gguf-py'}"}
    run = subprocess.run(command, capture_output=True, text=True, env=path, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    directory = checkpoint.resolve(str(file))
    config = checkpoint.read_config(directory) | {"eos_token_id": None}
    assert kind.architecture_from_hf(config) == arch
    gguf_files.check_same(source, directory, kind, 1e-6)
    tokenizers = load_tokenizer(source), load_tokenizer(directory)
    for text in (*TEXTS, "<|im_end|>", "▁"):
        assert len({json.dumps(tokenizer.encode(text)) for tokenizer in tokenizers}) == 1, text
    # llama.cpp reads GELU from a table of 16-bit floats.
    _check_decoding(file, rows, tolerance=5e-3 if name == "gemma3" else 5e-4)


def _check_decoding(file, num_tokens, tolerance):
    """Compares greedy tokens and the log-probabilities of the likeliest with llama.cpp's."""
    sampling = dflash.Sampling(temperature=0, max_tokens=12, logprobs=20, ignore_eos=True)
    llm = dflash.LLM(None, "dtype=float32", "drafter.name=none", target=file)
    (completion,) = llm.generate([PROMPT], sampling)
    ids = list(completion.token_ids)
    prompts = [PROMPT + ids[:count] for count in range(len(ids))]
    answers = llama_cpp.next_tokens(file, prompts, num_tokens)
    ends = llm.target.arch.eos_token_id
    assert [token for tokens, _ in answers for token in tokens or ends] == ids
    compared = [pair for pair in zip(completion.logprobs, answers, strict=True) if pair[1][1]]
    assert compared
    for ours, (_, theirs) in compared:
        expected = [theirs[token] for token in ours.top_ids]
        np.testing.assert_allclose(ours.top_logprobs, expected, atol=tolerance)
