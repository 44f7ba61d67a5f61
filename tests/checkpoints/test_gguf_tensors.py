"""Models in GGUF files: the architecture, and each weight bit for bit."""

import sys

import gguf
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from support import failure, gguf_files
from support.gguf_files import llama_values
from support.golden import build_target

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.checkpoints.gguf import architecture, file_header, hf_tensors, layouts, tokenizer_files
from dflash.loading import quantization
from dflash.models.dense import Llama3

FAMILIES = ["llama3", "qwen2", "qwen3", "qwen3_moe"]
WRITTEN = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 TQ1_0 TQ2_0 MXFP4".split()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {"tie_word_embeddings": tied}) for family in FAMILIES for tied in (False, True)),
        # Those whose tensors are changed.
        ("smollm3", {}),
        ("gemma3_text", {"final_logit_softcapping": 5.0, "rope_local_base_freq": 1e4}),
        ("gpt_oss", {}),
        ("qwen3_next", {}),
        ("qwen3_5_text", {}),
        ("qwen3_5_text", gguf_files.EXPERTS),
    ],
)
def test_a_file_loads_as_the_directory_that_it_was_made_from(tmp_path, family, fields):
    kind, arch = gguf_files.make_model(tmp_path / "m", family, **fields)
    more = {"gemma3.final_logit_softcapping": 5.0} if family == "gemma3_text" else {}
    gguf_files.write(tmp_path / "m.gguf", tmp_path / "m", more=more)
    directory = checkpoint.resolve(str(tmp_path / "m.gguf"))
    for source in (tmp_path / "m", directory):
        assert kind.architecture_from_hf(checkpoint.read_config(source)) == arch
    tolerance = 0 if family in FAMILIES else 1e-6
    gguf_files.check_same(tmp_path / "m", directory, kind, tolerance)


def test_layers_that_only_draft_are_not_read(tmp_path):
    kind, arch = gguf_files.make_model(tmp_path / "m", "qwen3_5_text")
    more = {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    beside = {"blk.2.nextn.eh_proj.weight": np.zeros((4, 4), np.float32)}
    gguf_files.write(tmp_path / "m.gguf", tmp_path / "m", more=more, beside=beside)
    directory = checkpoint.resolve(str(tmp_path / "m.gguf"))
    assert kind.architecture_from_hf(checkpoint.read_config(directory)) == arch
    assert not [name for name in hf_tensors.read_tensors(directory) if "layers.2" in name]


@pytest.mark.parametrize("drafting", [0, 1])
def test_recurrent_layers_are_those_of_the_interval(tmp_path, drafting):
    gguf_files.make_model(tmp_path / "m", "qwen3_5_text")
    key, message = "qwen35.attention.recurrent_layers", "is not all layers but every 2th"
    more = {"qwen35.block_count": 2 + drafting, "qwen35.nextn_predict_layers": drafting}
    for pattern, is_read in (([True, False], True), ([False, True], False)):
        more[key] = pattern + [False] * drafting
        gguf_files.write(tmp_path / "m.gguf", tmp_path / "m", more=more)
        if is_read:
            checkpoint.resolve(str(tmp_path / "m.gguf"))
        else:
            assert message in failure(checkpoint.resolve, str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("ffn_gate_inp_shexp", [(8,), (1, 8)]), ("ssm_conv1d", [(8, 4), (8, 1, 4)])],
)
def test_dimensions_of_one_are_there_or_left_out(name, shapes):
    layout = [layouts.grouped_delta(f"blk.0.{name}.weight", shape, {}) for shape in shapes]
    assert layout[0].shape(shapes[0]) == layout[1].shape(shapes[1]) == shapes[1]


def test_a_model_in_several_files(tmp_path):
    """The parts are those that the package writes."""
    kind, arch = gguf_files.make_model(tmp_path / "m", "llama3")
    gguf_files.write(tmp_path / "m.gguf", tmp_path / "m", split_max_tensors=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    directory = checkpoint.resolve(str(parts[0]))
    assert kind.architecture_from_hf(checkpoint.read_config(directory)) == arch
    gguf_files.check_same(tmp_path / "m", directory, kind)
    assert failure(checkpoint.resolve, str(parts[1])) == (
        f"{parts[1]}: a part of a model that is split into 3 files; give the first, "
        "…-00001-of-00003.gguf, or join them with llama-gguf-split --merge"
    )
    parts[2].unlink()
    message = f"{parts[2]}: missing; the model is split into 3 files"
    assert failure(checkpoint.resolve, str(parts[0])) == message


def test_yarn_of_gpt_oss_is_not_rounded_and_gemma_scales_linearly():
    values = llama_values(32, 2) | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 32.0,
        "llama.rope.scaling.original_context_length": 4096,
    }
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    windows = {"attention.sliding_window": 4, "expert_count": 2, "expert_used_count": 1}
    own = {f"llama.{key}": value for key, value in windows.items()}
    own["llama.expert_feed_forward_length"] = 8
    found = config_of("gpt-oss", values | own)
    assert found["rope_scaling"] == yarn | {"truncate": False}
    assert found["layer_types"] == ["sliding_attention"]
    linear = {"llama.rope.scaling.type": "linear", "llama.attention.sliding_window": 4}
    found = config_of("gemma3", values | linear)
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 32.0}
    assert found["sliding_window"] == 4


def config_of(name, values):
    """The config.json of a file with the metadata of a llama, under another architecture."""
    values = {key.replace("llama.", f"{name}."): value for key, value in values.items()}
    entry = file_header.TensorEntry("F32", (4, 32), 0, 512, "x.gguf")
    values["general.architecture"] = name
    header = file_header.GgufHeader("x.gguf", values, {"token_embd.weight": entry})
    return architecture.config_of(header)


def test_gemma_states_its_windows_by_interval_or_by_layer(tmp_path):
    values = llama_values(32, 2) | {"llama.block_count": 7, "llama.attention.sliding_window": 4}
    pattern = "llama.attention.sliding_window_pattern"
    sliding, full = "sliding_attention", "full_attention"
    for stated, kinds in (
        ({}, [sliding] * 5 + [full, sliding]),
        ({pattern: 2}, [sliding, full] * 3 + [sliding]),
        ({pattern: [False] + [True] * 6}, [full] + [sliding] * 6),
        ({"llama.attention.sliding_window": 0}, [full] * 7),
    ):
        assert config_of("gemma3", values | stated)["layer_types"] == kinds
    message = failure(config_of, "gemma3", values | {pattern: [True]})
    assert "gemma3.attention.sliding_window_pattern is [True], which is not supported" in message


def test_experts_in_mxfp4_stay_in_eight_bits(tmp_path):
    """They are the numbers that the package dequantizes; gate and up alternate."""
    gguf_files.make_model(tmp_path / "m", "gpt_oss", hidden_size=64, intermediate_size=32)
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    gguf_files.write(tmp_path / "m.gguf", tmp_path / "m", kind=mxfp4)
    model = build_target(str(tmp_path / "m.gguf"), None)
    reader = gguf.GGUFReader(str(tmp_path / "m.gguf"))
    stacks = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    experts = model.layers[0].mlp.experts
    x = np.zeros((1, 1), np.float32)
    for kernel, names in (
        (experts.interleaved_proj, ("gate", "up")),
        (experts.down_proj, ("down",)),
    ):
        assert kernel.kernel.dtype == np.int8
        parts = [stacks[f"blk.0.ffn_{name}_exps.weight"] for name in names]
        whole = np.stack(parts, axis=2).reshape(len(parts[0]), -1, parts[0].shape[-1])
        np.testing.assert_array_equal(np.asarray(kernel.plain(x)).swapaxes(1, 2), whole)


def test_a_hybrid_in_q8_0_stays_in_eight_bits(tmp_path):
    """Value heads that are whole blocks can be reordered; others are dequantized."""
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for width, kept in ((32, True), (16, False)):
        directory = tmp_path / f"m{width}"
        sizes = {"linear_value_head_dim": width, "hidden_size": 64, "intermediate_size": 64}
        gguf_files.make_model(directory, "qwen3_5_text", **sizes)
        file = f"{directory}.gguf"
        gguf_files.write(file, directory, kind=q8_0)
        plain, eight = (build_target(file, scheme).layers[0].self_attn for scheme in (None, "q8_0"))
        x = np.zeros((1, 1), np.float32)
        for name in ("q_proj", "v_proj", "z_proj", "out_proj"):
            kernel = getattr(eight, name)
            assert (kernel.format is not None) == (kept or name != "out_proj")
            np.testing.assert_array_equal(
                np.asarray(kernel.plain(x)), getattr(plain, name).plain(x), err_msg=name
            )


@pytest.mark.parametrize("name", WRITTEN)
def test_every_quantization_is_read_as_the_package_reads_it(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    width = gguf.GGML_QUANT_SIZES[kind][0] * 2
    values = np.random.default_rng(0).normal(size=(6, width)).astype(np.float32)
    name = "token_embd.weight"
    gguf_files.write_parts(
        tmp_path / "model.gguf", llama_values(width, 1), {name: values}, {name: kind}
    )
    tensor = hf_tensors.read_tensors(tmp_path)["model.embed_tokens.weight"]
    expected = gguf.dequantize(gguf.quantize(values, kind), kind).reshape(6, width)
    np.testing.assert_array_equal(tensor.read((slice(0, 6), slice(0, width))), expected)
    np.testing.assert_array_equal(tensor.read((slice(2, 5), slice(3, 9))), expected[2:5, 3:9])


@pytest.mark.parametrize("name", "Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS IQ2_XXS IQ1_M".split())
def test_rows_of_types_that_only_llama_cpp_writes(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    width, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 256, (4, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
    gguf_files.write_values(writer, llama_values(2 * width, 1))
    gguf_files.finish(writer)
    tensor = hf_tensors.read_tensors(tmp_path)["model.embed_tokens.weight"]
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(stored, kind)
    np.testing.assert_array_equal(tensor.read((slice(1, 4), slice(0, 2 * width))), expected[1:4])


@pytest.mark.parametrize("heads", [1, 3])
def test_any_rows_of_permuted_heads(tmp_path, heads):
    stored = np.arange(heads * 8 * 32, dtype=np.float32).reshape(heads * 8, 32)
    tensors = {"token_embd.weight": np.zeros((4, 32), np.float32)}
    tensors["blk.0.attn_q.weight"] = gguf_files.permute(stored, heads)
    values = llama_values(32, heads) | {"llama.attention.key_length": 8}
    gguf_files.write_parts(tmp_path / "model.gguf", values, tensors)
    tensor = hf_tensors.read_tensors(tmp_path)["model.layers.0.self_attn.q_proj.weight"]
    for first in range(len(stored)):
        for last in range(first + 1, len(stored) + 1):
            rows = tensor.read((slice(first, last), slice(5, 9)))
            np.testing.assert_array_equal(rows, stored[first:last, 5:9])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma' is not supported, only llama"),
        ({"llama.logit_scale": 2.0}, "that are not supported: llama.logit_scale=2.0"),
        ({"llama.expert_count": 8}, "that are not supported: llama.expert_count=8"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: 8 is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "is not supported, only 'yarn' and 'linear'"),
        ({"llama.block_count": "x"}, "llama.block_count: expected int, got str"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0, which is not"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: 't5' is not supported, only gpt2"),
    ],
)
def test_an_unsupported_option_is_named(tmp_path, more, message):
    gguf_files.make_model(tmp_path / "m", "llama3")
    gguf_files.write(tmp_path / "m.gguf", tmp_path / "m", more=more)
    assert message in failure(checkpoint.resolve, str(tmp_path / "m.gguf"))


def test_unexpected_tensors_are_named(tmp_path):
    names = "token_embd.weight", "blk.0.attn_output.bias"
    tensors = {name: np.zeros((4, 4), np.float32) for name in names}
    gguf_files.write_parts(tmp_path / "model.gguf", llama_values(4, 1), tensors)
    assert "1 unexpected tensors: 'blk.0.attn_output.bias'" in failure(
        hf_tensors.read_tensors, tmp_path
    )


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_scaling_of_llama_3(tmp_path, factor):
    """The divisors are those that llama.cpp's converter computes."""
    width, theta = 64, 500_000.0
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1) / 3
    divisors = np.where(
        wavelengths < 8192 / 4,
        1,
        np.where(wavelengths > 8192, factor, 1 / ((1 - smooth) / factor + smooth)),
    ).astype(np.float32)
    values = llama_values(width, 1) | {"llama.rope.freq_base": theta}
    for name, scale in (("right", 1), ("wrong", 1.1)):
        tensors = {"token_embd.weight": np.zeros((4, width), np.float32)}
        tensors["rope_freqs.weight"] = (divisors * scale).astype(np.float32)
        gguf_files.write_parts(tmp_path / f"{name}.gguf", values, tensors)
    found = checkpoint.read_config(checkpoint.resolve(str(tmp_path / "right.gguf")))
    assert found["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    message = failure(checkpoint.resolve, str(tmp_path / "wrong.gguf"))
    assert "only the rotary scaling of Llama 3.1 and 3.2 is supported" in message


VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.integers(-2, 70), st.floats(width=32), st.booleans(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3) | st.floats(width=32) | st.text(max_size=2), max_size=4),
)  # fmt: skip


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """The header of a file with every key that is read, and with frequency divisors."""
    file = tmp_path_factory.mktemp("scaled") / "x.gguf"
    tensors = {"token_embd.weight": np.zeros((4, 64), np.float32)}
    tensors["rope_freqs.weight"] = np.ones(16, np.float32)
    more = {
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
        "rope.dimension_count": 32, "rope.freq_base": 1e4, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16, "vocab_size": 4,
    }  # fmt: skip
    more = {f"llama.{key}": value for key, value in more.items()}
    tokenizer = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "a", "b"],
        "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0], "tokenizer.ggml.token_type": [2, 3, 1, 1],
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    gguf_files.write_parts(file, llama_values(64, 2) | more | tokenizer, tensors)
    return file_header.read_header(file)


@hypothesis.settings(max_examples=150)
@hypothesis.given(data=st.data())
def test_any_metadata_are_read_or_refused_in_one_line(scaled, data):
    metadata = dict(scaled.metadata)
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=3)):
        metadata[key] = data.draw(VALUES)
    tensors = dict(scaled.tensors)
    if data.draw(st.booleans()):
        del tensors["rope_freqs.weight"]
    header = file_header.GgufHeader(scaled.file, metadata, tensors)
    problem = ""
    try:
        Llama3.architecture_from_hf(architecture.config_of(header))
        tokenizer_files.of_file(header).files()
        tokenizer_files.of_file(header).end_ids()
    except errors.CheckpointError as error:
        problem = str(error)
    assert "Traceback" not in problem


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    gguf_files.make_model(tmp_path / "m")
    gguf_files.write(tmp_path / "m.gguf", tmp_path / "m")
    monkeypatch.setitem(sys.modules, "gguf", None)
    message = failure(checkpoint.resolve, str(tmp_path / "m.gguf"))
    assert "needs gguf; pip install 'dflash-jax[gguf]'" in message


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_q8_0_stays_in_eight_bits(tmp_path, family, tensor):
    """The values are those that are dequantized otherwise; embeddings are dequantized always."""
    sizes = {"num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 64}
    gguf_files.make_model(tmp_path / "m", family, **sizes)
    file = tmp_path / "m.gguf"
    gguf_files.write(file, tmp_path / "m", kind=gguf.GGMLQuantizationType.Q8_0)
    plain, kept = (
        build_target(f"{file}", quantization, tensor=tensor) for quantization in (None, "q8_0")
    )
    projections = dict(quantization.projections(kept))
    plain_ones = {path for path, kernel in projections.items() if kernel.format is None}
    assert all(".experts.down_proj" in path for path in plain_ones)  # Rows of 24 numbers.
    assert kept.embed_tokens.embedding.dtype == np.float32
    x = np.zeros((1, 1), np.float32)
    for path, kernel in quantization.projections(plain):
        assert (projections[path].kernel.dtype == np.int8) == (path not in plain_ones)
        np.testing.assert_array_equal(
            np.asarray(projections[path].plain(x)), kernel.plain(x), err_msg=path
        )


def test_what_cannot_stay_in_q8_0_is_named(tmp_path):
    gguf_files.make_model(tmp_path / "m")
    gguf_files.write(tmp_path / "m.gguf", tmp_path / "m")
    for place in ("m", "m.gguf"):
        message = "target.quantization: q8_0 keeps the projections of a GGUF file in Q8_0, and "
        given = str(tmp_path / place), "q8_0"
        assert message in failure(build_target, *given, kind=errors.ConfigError)
