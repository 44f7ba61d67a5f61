"""GGUF files that `dflash convert` writes: as llama.cpp's converter writes them, and read back."""

import json
import pathlib

import gguf
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import failure, gguf_files
from support.golden import GOLDEN
from support.trained_tokenizers import train_byte_level, write_json

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.checkpoints.gguf import block_drafter, file_header, tokenizer_files, tokenizer_metadata
from dflash.config import registry
from dflash.drafters.dflash import DFlash
from dflash.loading import conversion, models
from dflash.text.tokenizer_loading import load_tokenizer

TEXTS = ["Hello, world! 12345 \n\n  it's", "<|end|><|user|> a ▁b", "naïve Ωμέγα 🙂", ""]


@pytest.fixture
def vocabulary(tmp_path) -> str:
    """A GGUF file with a tokenizer of ten tokens."""
    tokens = ["<unk>", "<s>", "</s>", *"abcdefg"]
    values = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(10)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 7], "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    values |= gguf_files.llama_values(8, 1) | {"llama.block_count": 0}
    file = str(tmp_path / "vocabulary.gguf")
    gguf_files.write_parts(file, values, {"token_embd.weight": np.zeros((10, 8), np.float32)})
    return file


def convert(source, destination, **options):
    to = "gguf" if str(destination).endswith(".gguf") else "hf"
    return conversion.convert(str(source), pathlib.Path(destination), to=to, **options)


def make(directory, source, **changes):
    """A copy of a golden checkpoint whose config.json is changed."""
    directory.mkdir()
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def architecture(directory):
    config = checkpoint.read_config(directory)
    kind = models.find_class(config, directory, {**registry.TARGETS, **registry.DRAFTERS})[1]
    return kind.architecture_from_hf(config)


def contents(file):
    reader = gguf.GGUFReader(str(file))
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    return {key: field.contents() for key, field in fields.items()}, tensors


@pytest.mark.parametrize("case", ["qwen3_b1", "qwen3moe_v20", "llama3", "qwen2"])
def test_a_target_is_written_as_llama_cpp_writes_it(tmp_path, vocabulary, case):
    """The names of the `gguf` package and the rules of llama.cpp's converter."""
    source = tmp_path / "source"
    if (GOLDEN / case).exists():
        make(source, GOLDEN / case / "target")
    else:
        gguf_files.make_model(source, case, tie_word_embeddings=False)
    convert(source, tmp_path / "x.gguf", tokenizer=vocabulary)
    config = architecture(source)
    gguf_files.write(tmp_path / "expected.gguf", normalized(tmp_path, source))
    found, expected = contents(tmp_path / "x.gguf"), contents(tmp_path / "expected.gguf")
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)
    for key, value in expected[0].items():
        assert found[0][key] == value, key
    assert len(found[0]["tokenizer.ggml.tokens"]) == config.vocab_size
    convert(tmp_path / "x.gguf", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, value in load_file(source / "model.safetensors").items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def normalized(tmp_path, source):
    """The checkpoint with the fields that `gguf_files` expects."""
    directory = tmp_path / "normalized"
    convert(source, directory)
    config = checkpoint.read_config(source)
    kind = models.find_class(config, source, registry.TARGETS)[1]
    fields = kind.config_to_hf(kind.architecture_from_hf(config))
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


DRAFTERS = {
    "dflash": ("qwen3_b1/draft", {}),
    "windows": (
        "qwen3_v12/draft",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
         "is_causal": True},
    ),
    "values and rotary": (
        "qwen3_b1/draft", {"attention_value_scale": 0.5, "partial_rotary_factor": 0.5},
    ),
    "dflash2": ("dflash2_v32/draft", {}),
    "dspark": ("dspark_v32/draft_vanilla", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_read_back(tmp_path, vocabulary, name):
    source, changes = DRAFTERS[name]
    tensors = make(tmp_path / "source", GOLDEN / source, **changes)
    convert(tmp_path / "source", tmp_path / "x.gguf", tokenizer=vocabulary)
    convert(tmp_path / "x.gguf", tmp_path / "back")
    shape, back = architecture(tmp_path / "source"), architecture(tmp_path / "back")
    for field in vars(shape).keys() - {"num_target_layers", "decoder"}:
        assert getattr(back, field) == getattr(shape, field), field
    for field in vars(shape.decoder).keys() - {"tie_word_embeddings", "eos_token_id"}:
        assert getattr(back.decoder, field) == getattr(shape.decoder, field), field
    found = load_file(tmp_path / "back" / "model.safetensors")
    ignored = {"embed_tokens.weight", "lm_head.weight"}  # A DSpark file's copies of the target's.
    assert tensors.keys() - ignored == found.keys() - ignored
    for key in found:
        np.testing.assert_array_equal(found[key], tensors[key], err_msg=key)


def test_codes_of_a_draft_vocabulary_have_a_row_for_each_token(tmp_path, vocabulary):
    tensors = make(tmp_path / "source", GOLDEN / "dflash2_v32" / "draft", draft_vocab_size=7)
    size = len(tensors["candidate_selector.predecessor_codebook"])
    ids, name = np.array([1, 2, 5, 9, 17, 18, 30]), "candidate_selector.successor_codebook"
    tensors |= {
        "d2t": ids - np.arange(7),
        "t2d": np.isin(np.arange(size), ids),
        "lm_head.weight": np.ones((7, tensors["norm.weight"].shape[0]), np.float32),
        name: np.ascontiguousarray(tensors[name][ids]),
    }
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    convert(tmp_path / "source", tmp_path / "x.gguf", tokenizer=vocabulary)
    np.testing.assert_array_equal(contents(tmp_path / "x.gguf")[1]["d2t"], ids)
    assert file_header.read_header(tmp_path / "x.gguf").tensors["d2t"].kind == "I64"
    stored = contents(tmp_path / "x.gguf")[1]["selector_successor.weight"]
    np.testing.assert_array_equal(stored[ids], tensors[name])
    assert stored.shape[0] == size
    assert np.count_nonzero(stored.any(axis=1)) == 7
    convert(tmp_path / "x.gguf", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_bfloat16_keeps_vectors_in_float32(tmp_path, vocabulary):
    source = GOLDEN / "qwen3_b1" / "draft"
    convert(source, tmp_path / "x.gguf", tokenizer=vocabulary, dtype="bfloat16")
    kinds = file_header.read_header(tmp_path / "x.gguf").tensors
    assert kinds["fc.weight"].kind == "BF16"
    assert kinds["output_norm.weight"].kind == "F32"
    convert(tmp_path / "x.gguf", tmp_path / "back", dtype="bfloat16")
    convert(source, tmp_path / "direct", dtype="bfloat16")
    back, direct = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "direct"))
    for name, value in direct.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_a_sentencepiece_tokenizer_encodes_alike(tmp_path):
    source = checkpoint.resolve("assets/tiny_target")
    check_alike(tmp_path, source, tokenizer_metadata.values_of(source, 4096))


@pytest.mark.parametrize("single_digits", [False, True])
def test_a_byte_level_tokenizer_encodes_alike(tmp_path, single_digits):
    train_byte_level(tmp_path, specials=["<|end|>", "<|user|>"])
    content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    parts = [{"type": "Digits", "individual_digits": True}] if single_digits else []
    parts.append(content["pre_tokenizer"])
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    write_json(tmp_path / "tokenizer.json", content)
    config = {"bos_token": "<|user|>", "eos_token": {"content": "<|end|>"}}
    write_json(tmp_path / "tokenizer_config.json", config | {"chat_template": "{{x}}"})
    write_json(tmp_path / "config.json", {"eos_token_id": [0, 1]})
    values = tokenizer_metadata.values_of(tmp_path, 310)
    assert values["tokenizer.ggml.pre"] == ("smollm" if single_digits else "gpt-2")
    assert values["tokenizer.chat_template"] == "{{x}}"
    assert values["tokenizer.ggml.tokens"][-1] == "[PAD309]"
    ids = [values[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot")]
    assert ids == [1, 0, 1]
    check_alike(tmp_path, tmp_path, values)


def check_alike(tmp_path, source, values):
    header = file_header.GgufHeader(tmp_path / "x.gguf", values, {})
    (tmp_path / "again").mkdir()
    for name, content in tokenizer_files.of_file(header).files().items():
        (tmp_path / "again" / name).write_bytes(content)
    before, after = load_tokenizer(source), load_tokenizer(tmp_path / "again")
    for text in TEXTS:
        assert after.encode(text) == before.encode(text)
        assert after.encode_rendered(text) == before.encode_rendered(text)


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("eagle3_llama_v40/draft", {}, "cannot be written as a GGUF file, only LlamaForCausalLM"),
        ("dspark_v32/draft_gated", {}, "markov_head_type: 'gated' is not supported"),
        ("dspark_v32/draft_vanilla", {"confidence_head_with_markov": False},
         "confidence_head_with_markov: false is not supported"),
        ("qwen3_v12/draft",
         {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
         "causal and bidirectional layers in one drafter cannot be written"),
        ("deepseek_v14/target", {}, "DeepseekV3ForCausalLM cannot be written as a GGUF file"),
    ],
)  # fmt: skip
def test_models_that_have_no_gguf_layout(tmp_path, vocabulary, source, changes, message):
    make(tmp_path / "source", GOLDEN / source, **changes)
    given = tmp_path / "source", tmp_path / "x.gguf"
    assert message in failure(convert, *given, tokenizer=vocabulary)
    assert not (tmp_path / "x.gguf").exists()


def test_a_drafter_without_a_tokenizer(tmp_path):
    source = GOLDEN / "qwen3_b1" / "draft"
    with pytest.raises(errors.CheckpointError, match="give the target's checkpoint with --token"):
        convert(source, tmp_path / "x.gguf")
    with pytest.raises(errors.CheckpointError, match="4096 tokens, but the model only"):
        convert(source, tmp_path / "x.gguf", tokenizer="assets/tiny_target")


@hypothesis.settings(max_examples=80)
@hypothesis.given(data=st.data())
def test_any_metadata_of_a_drafter_are_read_or_refused_in_one_line(drafter_header, data):
    metadata = dict(drafter_header.metadata)
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=2)):
        metadata[key] = data.draw(
            st.integers(-2, 2**33) | st.floats(width=32) | st.booleans() | st.text(max_size=2)
            | st.lists(st.integers(-1, 40) | st.booleans(), max_size=3)
        )  # fmt: skip
    header = file_header.GgufHeader(drafter_header.file, metadata, drafter_header.tensors)
    problem = ""
    try:
        DFlash.architecture_from_hf(block_drafter.config_of(header))
    except errors.CheckpointError as error:
        problem = str(error)
    assert "Traceback" not in problem


@pytest.fixture(scope="module")
def drafter_header(tmp_path_factory):
    """The header of a drafter with every key that is read."""
    directory = tmp_path_factory.mktemp("drafter")
    layers = ["sliding_attention", "full_attention"]
    config = checkpoint.read_config(GOLDEN / "qwen3_v12" / "draft")
    config |= {"layer_types": layers, "sliding_window": 4, "is_causal": True}
    config |= {"attention_value_scale": 0.5, "partial_rotary_factor": 0.5}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config["rope_parameters"] = scaling | {"rope_theta": 1e4}
    shape = DFlash.architecture_from_hf(config)
    metadata = block_drafter.metadata_of(DFlash.config_to_hf(shape))
    metadata["tokenizer.ggml.tokens"] = ["a"] * shape.decoder.vocab_size
    header = file_header.GgufHeader(directory / "x.gguf", metadata, {})
    assert DFlash.architecture_from_hf(block_drafter.config_of(header)).views == shape.views
    return header


def test_a_failed_write_leaves_nothing(tmp_path, vocabulary, monkeypatch):
    def fail(*unused):
        raise OSError(28, "full")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    with pytest.raises(errors.WorkdirError, match="cannot be written: full"):
        convert(GOLDEN / "qwen3_b1" / "draft", tmp_path / "o" / "x.gguf", tokenizer=vocabulary)
    assert not list((tmp_path / "o").iterdir())
