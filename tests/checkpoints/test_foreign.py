"""Descriptions of directories that are not usable checkpoints, with advice."""

import json

import pytest
from support import failure

from dflash.checkpoints import checkpoint, foreign

PICKLES = (
    "holds pickled PyTorch weights only, which are never loaded because they can run code; convert "
    "them to safetensors (save_pretrained of transformers does)"
)
FORMATS = {
    "adapter_config.json": "holds a LoRA adapter; give its base model as target.checkpoint, "
    "and the adapter as target.adapter",
    "model-q4_k_m.gguf": "holds GGUF weights of llama.cpp; give the .gguf file itself",
    "pytorch_model.bin": PICKLES,
    "consolidated.00.pth": PICKLES,
    "consolidated.safetensors": "holds weights in Mistral's layout; take the Hugging Face layout",
    "tf_model.h5": "holds TensorFlow weights; take the safetensors version",
    "flax_model.msgpack": "holds Flax weights; take the safetensors version",
    "model.onnx": "holds an ONNX model; take the safetensors version",
    "weights.00.npz": "holds numpy or MLX weights; take the safetensors version",
    "notes.txt": "no weights in it; expected model.safetensors (or shards with an index) beside "
    "config.json, or params/ of Orbax",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_foreign_format_is_named(tmp_path, name):
    (tmp_path / name).touch()
    assert failure(checkpoint.read_config, tmp_path) == (
        f"{tmp_path}: no config.json: {FORMATS[name]}"
    )
    (tmp_path / "config.json").write_text("{}")
    assert failure(checkpoint.layout, tmp_path) == f"{tmp_path}: {FORMATS[name]}"
    if name not in ("notes.txt", "model-q4_k_m.gguf"):
        said = failure(checkpoint.resolve, str(tmp_path / name))
        assert said == f"{tmp_path / name}: {FORMATS[name].removeprefix('holds ')}"


def test_a_training_directory_says_where_its_weights_are(tmp_path):
    (tmp_path / "config.yml").touch()
    assert foreign.describe(tmp_path) == "the work directory of a run, not a checkpoint"
    (tmp_path / "checkpoints").mkdir()
    assert foreign.describe(tmp_path) == (
        "a training directory without weights yet: dflash train writes them to hf/ in it"
    )
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    assert foreign.describe(tmp_path) == (f"a training directory; its weights are in {tmp_path}/hf")


def test_an_entry_of_the_hubs_cache_says_where_its_checkpoint_is(tmp_path):
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    assert foreign.describe(tmp_path) == (
        f"an entry of the Hugging Face cache; the checkpoint is {tmp_path}/snapshots/abc"
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}},
         "quantization_config: quantized weights (aqlm)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights (4 bits)"),
        ({"quantization_config": "fp8"},
         "quantization_config: quantized weights (of an unknown kind)"),
        ({"quantization": {"bits": 4, "group_size": 64}},
         "quantization: quantized weights (4 bits)"),
    ],
)  # fmt: skip
def test_quantized_weights_are_not_read_as_plain_ones(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert failure(checkpoint.read_config, tmp_path) == (
        f"{tmp_path}/config.json: {words} are not supported, only fp8, mxfp4, awq, "
        "gptq, and compressed-tensors of 8 bits or packed 4; take the model's unquantized "
        "checkpoint"
    )


@pytest.mark.parametrize("stated", [None, {}])
def test_no_quantization_is_fine(tmp_path, stated):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    assert checkpoint.read_config(tmp_path) == {"quantization_config": stated}
