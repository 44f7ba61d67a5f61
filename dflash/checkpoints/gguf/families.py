"""Target families whose GGUF files are read: their tensors, and their fields of config.json.

Keys and rules: llama.cpp, gguf-py/gguf/constants.py, src/models/ and the converters.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from dflash.checkpoints.gguf import file_header, layouts, stored_values, tensor_names
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.checkpoints.gguf.layouts import LayoutOf
from dflash.checkpoints.gguf.stored_values import Tensors
from dflash.checkpoints.gguf.tensor_names import TensorNames

# Field of config.json with the number of layers behind the others that are not read.
DRAFTING_LAYERS = "mtp_num_hidden_layers"

Fields = Mapping[str, Any]
Own = Callable[[GgufHeader, str, Fields], dict[str, Any]]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = "attention.sliding_window_pattern"
_WINDOW, _BASE_IN_WINDOWS = "attention.sliding_window", "rope.freq_base_swa"
_SOFTCAP, _EXPERT_WIDTH = "final_logit_softcapping", "expert_feed_forward_length"
_ROTATED, _INTERVAL, _INNER = "rope.dimension_count", "full_attention_interval", "ssm.inner_size"
_MTP_LAYERS, _RECURRENT = "nextn_predict_layers", "attention.recurrent_layers"
_GEMMA_INTERVAL, _GEMMA_27B_LAYERS = 6, 62
_GEMMA_WINDOW_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class Family:
    """Architecture of llama.cpp that a target family here computes.

    Attributes:
      layout: Function from a tensor's name, its shape and config.json to its `TensorLayout`.
      join: Function that joins tensors that Hugging Face's layout does not separate.
      fields: Fields of config.json that the file states as integers, by key without the
        architecture.
      implied: Fields of config.json that the architecture implies.
      own: Function from the header, the architecture and a dot, and the common fields to further
        fields of config.json.
      own_keys: Keys that `own` reads, without the architecture.
      is_written: Whether models are written, too.
    """

    hf_class: str
    model_type: str
    names: TensorNames = tensor_names.TARGET
    layout: LayoutOf = layouts.as_stored
    join: Callable[[Tensors, Fields], Tensors] = stored_values.unchanged
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    implied: Fields = dataclasses.field(default_factory=dict)
    own: Own = lambda header, prefix, config: {}
    own_keys: Collection[str] = ()
    is_written: bool = True


def shortest(value: float) -> float:
    """Returns the shortest number with the same value in float32, such as 1e-05."""
    return float(str(np.float32(value)))


def rotated_part(rotated: int, head_dim: int) -> float:
    """Returns `partial_rotary_factor`, so that its product with `head_dim` is not rounded down."""
    part = rotated / head_dim
    return part if int(part * head_dim) == rotated else math.nextafter(part, 2)


def _gemma3(header: GgufHeader, prefix: str, config: Fields) -> dict[str, Any]:
    """Returns windows, rotary bases, and what the architecture implies by its size."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    window = header.get(prefix + _WINDOW, int, 0)
    base = header.get(prefix + _BASE_IN_WINDOWS, float, _GEMMA_WINDOW_BASE)
    softcap = header.get(prefix + _SOFTCAP, float)
    largest = layers == _GEMMA_27B_LAYERS
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window or None,
        "layer_types": _pattern(header, prefix, layers) if window else [_FULL] * layers,
        "rope_local_base_freq": shortest(base),
        "final_logit_softcapping": None if softcap is None else shortest(softcap),
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
    }


def _pattern(header: GgufHeader, prefix: str, layers: int) -> list[str]:
    """Returns the kinds of layers, of which the file may state the interval or each one."""
    pattern = header.metadata.get(prefix + _PATTERN, _GEMMA_INTERVAL)
    if type(pattern) is int and pattern > 0:
        return _alternating(layers, pattern)
    if not isinstance(pattern, list) or len(pattern) < layers or not {*pattern} <= {0, 1}:
        raise file_header.unsupported(header.file, f"{prefix}{_PATTERN} is {pattern!s:.40}")
    return [_SLIDING if slides else _FULL for slides in pattern[:layers]]


def _gpt_oss(header: GgufHeader, prefix: str, config: Fields) -> dict[str, Any]:
    """Returns windows, experts, and YaRN without the rounding that no file states."""
    scaling = config["rope_scaling"]
    packed = any(
        entry.kind == stored_values.MXFP4 and name.endswith("_exps.weight")
        for name, entry in header.tensors.items()
    )
    return {
        "attention_bias": True,
        "layer_types": _alternating(config["num_hidden_layers"], 2),
        "intermediate_size": header.require(prefix + _EXPERT_WIDTH, int),
        "rope_scaling": {**scaling, "truncate": False} if scaling else {"rope_type": "default"},
        **({"quantization_config": {"quant_method": "mxfp4"}} if packed else {}),
    }


def _hybrid(header: GgufHeader, prefix: str, config: Fields) -> dict[str, Any]:
    """Returns linear attention, partial rotation, and layers without those that only draft."""
    heads, inner = (header.require(prefix + key, int) for key in ("ssm.time_step_rank", _INNER))
    if heads < 1 or inner % heads or config["head_dim"] < 1:
        raise file_header.unsupported(header.file, f"{prefix}{_INNER} is {inner} for {heads} heads")
    rotated = header.get(prefix + _ROTATED, int, config["head_dim"])
    drafting = header.get(prefix + _MTP_LAYERS, int, 0)
    layers = config["num_hidden_layers"] - drafting
    interval = header.get(prefix + _INTERVAL, int, 4)
    pattern = [bool(layer % max(interval, 1)) for layer in range(1, layers + 1)]
    if header.get(prefix + _RECURRENT, list, pattern)[:layers] != pattern:
        reason = f"{prefix}{_RECURRENT} is not all layers but every {interval}th"
        raise file_header.unsupported(header.file, reason)
    return {
        "num_hidden_layers": layers,
        DRAFTING_LAYERS: drafting,
        "linear_value_head_dim": inner // heads,
        "partial_rotary_factor": rotated_part(rotated, config["head_dim"]),
        _INTERVAL: interval,
    }


def _alternating(layers: int, interval: int) -> list[str]:
    """Returns the kinds of layers, of which every `interval`th sees all positions."""
    return [_SLIDING if layer % interval else _FULL for layer in range(1, layers + 1)]


_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    _EXPERT_WIDTH: "moe_intermediate_size",
}
_SHARED_EXPERTS = _EXPERTS | {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size"
}
_LINEAR = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def _hybrid_family(hf_class: str, model_type: str, layout: LayoutOf, **options) -> Family:
    return Family(
        hf_class,
        model_type,
        names=tensor_names.HYBRID,
        layout=layout,
        own=_hybrid,
        # Sections of the rotary embedding tell images from text.
        own_keys={
            *(_INNER, _INTERVAL, _ROTATED, _MTP_LAYERS, _RECURRENT),
            "rope.dimension_sections",
        },
        is_written=False,
        **options,
    )


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", layout=layouts.paired_rope),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", fields=_EXPERTS, implied={"norm_topk_prob": True}
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        layout=layouts.paired_rope,
        implied={"no_rope_layer_interval": 4},
        is_written=False,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        names=tensor_names.GEMMA3,
        layout=layouts.shifted_norms,
        own=_gemma3,
        own_keys={_WINDOW, _PATTERN, _BASE_IN_WINDOWS, _SOFTCAP},
        is_written=False,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        names=tensor_names.GPT_OSS,
        join=stored_values.alternating_experts,
        fields={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            _WINDOW: "sliding_window",
        },
        own=_gpt_oss,
        own_keys={_EXPERT_WIDTH},
        is_written=False,
    ),
    "qwen3next": _hybrid_family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        layouts.grouped_delta,
        join=stored_values.qkvz,
        fields=_LINEAR | _SHARED_EXPERTS,
        implied={"norm_topk_prob": True},
    ),
    "qwen35": _hybrid_family(
        "Qwen3_5ForCausalLM", "qwen3_5_text", layouts.tiled_delta, fields=_LINEAR
    ),
    "qwen35moe": _hybrid_family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        layouts.tiled_delta,
        fields=_LINEAR | _SHARED_EXPERTS,
        implied={"norm_topk_prob": True},
    ),
}
