"""GGUF files of tiny models, written with the `gguf` package by the rules of llama.cpp."""

import json
import pathlib
import re
import types

import gguf
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dflash.checkpoints import checkpoint
from dflash.config import registry
from dflash.parallel import parameters
from support.models import family_architecture, make_architecture, make_sharding

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3, "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3, "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS, "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
}  # fmt: skip
PAIRED = "LlamaForCausalLM", "SmolLM3ForCausalLM"
TILED = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
# What a tiny member of a family has so that its file can state it.
FIELDS = {
    "smollm3": {"num_hidden_layers": 4},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "qwen3_next": {"layer_types": (), "full_attention_interval": 2},
    "qwen3_5_text": {"layer_types": (), "full_attention_interval": 2},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
FLOAT32 = gguf.GGMLQuantizationType.F32


def make_model(directory, family="qwen3", **changes):
    """A checkpoint with random weights; returns its class and its architecture."""
    kind = registry.load(registry.TARGETS[family].implementation)
    arch = family_architecture(family, make_architecture(), **FIELDS.get(family, {}) | changes)
    module = kind(arch, dtype=np.dtype("float32"), sharding=make_sharding())
    rng = np.random.default_rng(0)
    for _, leaf in parameters.named_parameters(module):
        leaf.set_value(jnp.asarray(rng.normal(0, 0.2, leaf.get_value().shape), jnp.float32))
    checkpoint.save(module, directory, kind.config_to_hf(arch))
    return kind, arch


def check_same(one, other, kind, tolerance: float = 0.0) -> None:
    """Compares what a class reads from two directories."""
    read = []
    for directory in (one, other):
        arch = kind.architecture_from_hf(checkpoint.read_config(directory))
        module = kind(arch, dtype=np.dtype("float32"), sharding=make_sharding())
        checkpoint.load(module, directory)
        read.append({path: leaf.get_value() for path, leaf in parameters.named_parameters(module)})
    assert read[0].keys() == read[1].keys()
    for path, value in read[0].items():
        np.testing.assert_allclose(
            read[1][path], value, rtol=tolerance, atol=tolerance, err_msg=path
        )


def write(
    file: pathlib.Path,
    directory: pathlib.Path,
    *,
    kind=FLOAT32,
    tokenizer=None,
    more=None,
    beside=None,
    **options,
):
    """Writes the model of a checkpoint directory as a GGUF file.

    Args:
      file: the file.
      directory: a checkpoint with config.json and model.safetensors, in float32.
      kind: type of the matrices; vectors, and rows that are no whole blocks, stay in float32.
      tokenizer: metadata of the tokenizer, by key.
      more: further metadata, which replace others.
      beside: further tensors, by their names in the file.
      **options: options of the writer.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[arch], **options)
    write_values(writer, metadata(config, arch) | (tokenizer or {}) | (more or {}))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, value in (beside or {}).items():
        add(writer, name, value)
    for name, value in tensors(directory, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        fits = value.ndim > 1 and value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        add(writer, stored, value, kind if fits else FLOAT32)
    finish(writer)


def llama_values(width: int, heads: int) -> dict:
    """The metadata that the files of a llama of one layer need."""
    values = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": width,
        "feed_forward_length": 8,
        "attention.head_count": heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    return {f"llama.{key}": value for key, value in values.items()}


def write_parts(file, values, tensors, kinds=types.MappingProxyType({})) -> None:
    """Writes a file of these metadata and tensors, by their names in it."""
    writer = gguf.GGUFWriter(str(file), "llama")
    write_values(writer, values)
    for name, value in tensors.items():
        add(writer, name, value, kinds.get(name, FLOAT32))
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
    rope_theta = config.get("rope_theta")
    if arch == gguf.MODEL_ARCH.GEMMA3:
        rope_theta = config["rope_parameters"]["full_attention"]["rope_theta"]
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
        "rope.freq_base": rope_theta,
        "vocab_size": config["vocab_size"],
    }
    values |= _of_experts(config)
    if "linear_num_key_heads" in config:
        heads = config["linear_num_value_heads"]
        values |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": heads,
            "ssm.inner_size": config["linear_value_head_dim"] * heads,
            "full_attention_interval": config["full_attention_interval"],
            "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
            "rope.dimension_sections": [1, 1, 0, 0],
        }
    if config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    if arch == gguf.MODEL_ARCH.GEMMA3:
        kinds = config["layer_types"]
        values["attention.sliding_window_pattern"] = kinds.index("full_attention") + 1
    return {f"{prefix}.{key}": value for key, value in values.items()}


def _of_experts(config) -> dict:
    if "num_local_experts" in config:  # gpt-oss, whose dense width is that of an expert.
        return {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["intermediate_size"],
        }
    if not config.get("num_experts"):
        return {}
    values = {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    shared = config.get("shared_expert_intermediate_size")
    return values | ({"expert_shared_feed_forward_length": shared} if shared else {})


def tensors(directory: pathlib.Path, config) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp's converters change them, under names that `gguf` knows."""
    stored = load_file(directory / "model.safetensors")
    family = config["architectures"][0]
    changed, experts = {}, {}
    for name, value in sorted(stored.items()):
        if re.search(r"\.experts\.\d", name):
            layer, _, rest = name.partition(".experts.")
            number, stem, _ = rest.split(".")
            experts.setdefault(f"{layer}.experts.{stem}", {})[int(number)] = value
        elif family in PAIRED and ".q_proj." in name:
            changed[name] = permute(value, config["num_attention_heads"])
        elif family in PAIRED and ".k_proj." in name:
            changed[name] = permute(value, config["num_key_value_heads"])
        elif family == "GptOssForCausalLM":
            changed |= of_gpt_oss(name, value)
        elif family == "Gemma3ForCausalLM":
            changed[name] = value + 1 if name.endswith("norm.weight") else value
        elif "linear_num_key_heads" in config:
            changed |= of_hybrid(name, value, config)
        else:
            changed[name] = value
    for name, parts in experts.items():
        changed[f"{name}.weight"] = np.stack([parts[i] for i in range(len(parts))])
    return changed


def of_gpt_oss(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Source: llama.cpp, conversion/gpt_oss.py."""
    if name.endswith("sinks"):
        return {f"{name}.weight": value}
    stem, _, leaf = name.rpartition(".experts.")
    if not stem:
        return {name: value}
    stem += ".experts"
    suffix = "bias" if leaf.endswith("_bias") else "weight"
    if suffix == "weight":
        value = value.swapaxes(1, 2)
    if leaf.startswith("down"):
        return {f"{stem}.down_proj.{suffix}": value}
    parts = {"gate_proj": value[:, ::2], "up_proj": value[:, 1::2]}
    return {f"{stem}.{part}.{suffix}": rows for part, rows in parts.items()}


def of_hybrid(name: str, value: np.ndarray, config) -> dict[str, np.ndarray]:
    """Source: llama.cpp, conversion/qwen.py, `_LinearAttentionVReorderBase` and its base."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def tile(rows, width):
        groups = rows.reshape(keys, values // keys, width, *rows.shape[1:])
        return groups.swapaxes(0, 1).reshape(rows.shape)

    if name.endswith(".conv1d.weight"):
        value = value.squeeze()
    if name.endswith("in_proj_qkvz.weight"):
        parts = value.reshape(keys, -1, value.shape[-1])
        ends = np.cumsum([key_dim, key_dim, values // keys * value_dim])
        q, k, v, z = (part.reshape(-1, value.shape[-1]) for part in np.split(parts, ends, axis=1))
        name = name.replace("in_proj_qkvz", "in_proj_qkv")
        return {name: np.concatenate([q, k, v]), name.replace("_qkv", "_z"): z}
    if config["architectures"][0] in TILED and "linear_attn." in name:
        leaf = name.rpartition("linear_attn.")[2]
        first = 2 * keys * key_dim
        if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
            value = np.concatenate([value[:first], tile(value[first:], value_dim)])
        elif leaf == "in_proj_z.weight":
            value = tile(value, value_dim)
        elif leaf in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            value = tile(value, 1)
        elif leaf == "out_proj.weight":
            value = tile(value.T, value_dim).T
    if name.endswith(".A_log"):
        value = -np.exp(value)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    elif name.endswith("shared_expert_gate.weight"):
        value = value.squeeze()
    return {name.replace(".dt_bias", ".dt_proj.bias"): value}


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
