"""Descriptions of unusable checkpoints, with advice on what to use instead."""

import pathlib
from collections.abc import Mapping
from typing import Any

_SUPPORTED = "model.safetensors (or shards with an index) beside config.json, or params/ of Orbax"
# Other formats, in order of precedence: (file patterns, description, advice).
_FORMATS = (
    (
        "adapter_config.json",
        "a LoRA adapter",
        "give its base model as target.checkpoint, and the adapter as target.adapter",
    ),
    ("*.gguf", "GGUF weights of llama.cpp", "give the .gguf file itself"),
    (
        "*.bin *.pt *.pth *.ckpt",
        "pickled PyTorch weights only, which are never loaded because they can run code",
        "convert them to safetensors (save_pretrained of transformers does)",
    ),
    ("consolidated*.safetensors", "weights in Mistral's layout", "take the Hugging Face layout"),
    ("*.h5 tf_model*", "TensorFlow weights", "take the safetensors version"),
    ("*.msgpack", "Flax weights", "take the safetensors version"),
    ("*.onnx", "an ONNX model", "take the safetensors version"),
    ("*.npz", "numpy or MLX weights", "take the safetensors version"),
)
_QUANTIZED = ("quantization_config", "quantization", "compression_config")
_METHODS = ("quant_method", "quant_algo", "quant_type")


def describe(directory: pathlib.Path) -> str:
    """Returns what an existing directory without usable weights holds, and what to use instead."""
    export = directory / "hf"
    if (export / "config.json").is_file():
        return f"a training directory; its weights are in {export}"
    if (directory / "checkpoints").is_dir() and (directory / "config.yml").is_file():
        return "a training directory without weights yet: dflash train writes them to hf/ in it"
    if (directory / "config.yml").is_file():
        return "the work directory of a run, not a checkpoint"
    if (directory / "snapshots").is_dir():
        inside = sorted(path for path in (directory / "snapshots").iterdir() if path.is_dir())
        where = inside[-1] if inside else "snapshots/ in it"
        return f"an entry of the Hugging Face cache; the checkpoint is {where}"
    for patterns, what, advice in _FORMATS:
        if any(any(directory.glob(pattern)) for pattern in patterns.split()):
            return f"holds {what}; {advice}"
    return f"no weights in it; expected {_SUPPORTED}"


def file_kind(path: pathlib.Path) -> str:
    """Returns what a file passed as a directory is, and what to use instead."""
    for patterns, what, advice in _FORMATS:
        if any(path.match(pattern) for pattern in patterns.split()):
            return f"{what}; {advice}"
    return f"a file; expected the directory around it, {path.parent}"


def quantization(config: Mapping[str, Any]) -> tuple[str, str | None, Mapping[str, Any]] | None:
    """Returns name, method and mapping of the field that declares quantized weights, or None."""
    key = next((key for key in _QUANTIZED if config.get(key)), None)
    if key is None:
        return None
    declaration = config[key] if isinstance(config[key], Mapping) else {}
    method = next((str(declaration[name])[:40] for name in _METHODS if declaration.get(name)), None)
    if method is None and declaration.get("bits"):
        method = f"{str(declaration['bits'])[:8]} bits"
    return key, method, declaration
