"""GGUF files of tiny models, written with the `gguf` package by the rules of llama.cpp."""

import json
import pathlib

import gguf
import jax
import numpy as np
from safetensors.numpy import load_file

from dflash.checkpoints import checkpoint
from dflash.config import registry
from dflash.parallel import parameters
from support.models import family_architecture, make_architecture, make_sharding

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
}
FLOAT32 = gguf.GGMLQuantizationType.F32


def make_model(directory, family="qwen3", **changes):
    """A checkpoint with random weights; returns its class and its architecture."""
    kind = registry.load(registry.TARGETS[family].implementation)
    arch = family_architecture(family, make_architecture(**changes))
    module = kind(arch, dtype=np.dtype("float32"), sharding=make_sharding())
    parameters.initialize(module, jax.random.key(0))
    checkpoint.save_hf(module, directory, kind.config_to_hf(arch))
    return kind, arch


def write(file: pathlib.Path, directory: pathlib.Path, *, kind=FLOAT32, tokenizer=None, more=None):
    """Writes the model of a checkpoint directory as a GGUF file.

    Args:
      file: the file.
      directory: a checkpoint with config.json and model.safetensors, in float32.
      kind: type of the matrices; vectors, and rows that are no whole blocks, stay in float32.
      tokenizer: metadata of the tokenizer, by key.
      more: further metadata, which replace others.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[arch])
    write_values(writer, metadata(config, arch) | (tokenizer or {}) | (more or {}))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, value in tensors(directory, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        fits = value.ndim > 1 and value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        add(writer, stored, value, kind if fits else FLOAT32)
    finish(writer)


def write_values(writer, values) -> None:
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def add(writer, name: str, value: np.ndarray, kind=FLOAT32) -> None:
    if kind == FLOAT32:
        writer.add_tensor(name, np.ascontiguousarray(value))
    else:
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)


def finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata(config, arch) -> dict:
    prefix = gguf.MODEL_ARCH_NAMES[arch]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    if "num_experts" in config:
        values |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return {f"{prefix}.{key}": value for key, value in values.items()}


def tensors(directory: pathlib.Path, config) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp's converter changes them: q and k permuted, experts stacked."""
    stored = load_file(directory / "model.safetensors")
    paired = config["architectures"][0] == "LlamaForCausalLM"
    changed, experts = {}, {}
    for name, value in sorted(stored.items()):
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            number, stem, _ = rest.split(".")
            experts.setdefault(f"{layer}.experts.{stem}", {})[int(number)] = value
        elif paired and ".q_proj." in name:
            changed[name] = permute(value, config["num_attention_heads"])
        elif paired and ".k_proj." in name:
            changed[name] = permute(value, config["num_key_value_heads"])
        else:
            changed[name] = value
    for name, parts in experts.items():
        changed[f"{name}.weight"] = np.stack([parts[i] for i in range(len(parts))])
    return changed


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Source: llama.cpp, conversion/llama.py, `permute`."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def sentencepiece_values(model) -> dict:
    """Metadata of a tokenizer, a `SentencePieceProcessor`, as llama.cpp's converter writes them."""
    ids = range(model.vocab_size())
    kinds = ((model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6))
    ends = {"bos": model.bos_id(), "eos": model.eos_id(), "unknown": model.unk_id()}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(token) for token in ids],
        "tokenizer.ggml.scores": [model.get_score(token) for token in ids],
        "tokenizer.ggml.token_type": [
            next((kind for holds, kind in kinds if holds(token)), 1) for token in ids
        ],
        **{f"tokenizer.ggml.{name}_token_id": token for name, token in ends.items() if token >= 0},
    }
