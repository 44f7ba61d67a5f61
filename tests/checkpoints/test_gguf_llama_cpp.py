"""Vocabularies of llama.cpp, and tiny models that its own converter writes."""

import json
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from support import gguf_files, llama_cpp
from support.golden import import_transformers
from support.models import make_sharding
from support.trained_tokenizers import TEXTS, train_byte_level, train_sentencepiece, write_json

from dflash.checkpoints import checkpoint
from dflash.checkpoints.gguf import file_header, tokenizer_files
from dflash.parallel import parameters
from dflash.text.tokenizer_loading import load_tokenizer

VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "qwen35"]
SEPARATOR = "\n__ggml_vocab_test__\n"
FAMILIES = ["llama3", "qwen2", "qwen3", "qwen3_moe", "smollm3"]
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
    for path, content in tokenizer_files.files_of(file_header.read_header(file)).items():
        (tmp_path / path).write_bytes(content)
    tokenizer = load_tokenizer(tmp_path)
    texts, lines = (
        vocabularies[f"ggml-vocab-{name}.gguf.{ending}"].decode() for ending in ("inp", "out")
    )
    for text, line in zip(texts.split(SEPARATOR), lines.split("\n"), strict=True):
        ids = tokenizer.encode(text, special_tokens=True, add_special_tokens=False)
        # Qwen's tokenizer.json composes characters, which llama.cpp does not.
        composed = unicodedata.normalize("NFC", text)
        assert ids == [int(token) for token in line.split()] or composed != text


@pytest.fixture(scope="module")
def converter(tmp_path_factory):
    import_transformers()
    directory = tmp_path_factory.mktemp("llama.cpp")
    for folder in ("", "conversion", "gguf-py/gguf"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
        for name, content in llama_cpp.files(folder, ".py").items():
            (directory / folder / name).write_bytes(content)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_its_source(tmp_path, monkeypatch, converter, family):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, file = tmp_path / "m", tmp_path / "m.gguf"
    kind, arch = gguf_files.make_model(source, family, vocab_size=384)
    if family == "llama3":
        train_sentencepiece(source, add_dummy_prefix=True)
        config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    else:
        train_byte_level(source)
        config = {"eos_token": "<|im_end|>"}
    write_json(source / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend"} | config)
    command = [sys.executable, "-c", CONVERTER, str(converter / "convert_hf_to_gguf.py")]
    command += [str(source), f"--outfile={file}", "--outtype=f32"]
    path = {"PYTHONPATH": f"{converter}:{converter / 'gguf-py'}"}
    run = subprocess.run(command, capture_output=True, text=True, env=path, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    directory = checkpoint.resolve(str(file))
    config = checkpoint.read_config(directory) | {"eos_token_id": None}
    assert kind.architecture_from_hf(config) == arch
    expected, loaded = (_parameters(path, kind) for path in (source, directory))
    assert loaded.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(loaded[path], value, rtol=1e-6, atol=1e-6, err_msg=path)
    tokenizers = load_tokenizer(source), load_tokenizer(directory)
    for text in (*TEXTS, "<|im_end|>", "▁"):
        assert len({json.dumps(tokenizer.encode(text)) for tokenizer in tokenizers}) == 1, text


def _parameters(directory, kind):
    arch = kind.architecture_from_hf(checkpoint.read_config(directory))
    module = kind(arch, dtype=np.dtype("float32"), sharding=make_sharding())
    checkpoint.load(module, directory)
    return {
        path: np.asarray(param.get_value()) for path, param in parameters.named_parameters(module)
    }
