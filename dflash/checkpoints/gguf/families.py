"""Target families whose GGUF files are read: their tensors, and their fields of config.json.

Keys and rules: llama.cpp, gguf-py/gguf/constants.py, src/models/ and the converters.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np

from dflash.checkpoints.gguf import layouts, stored_values, tensor_names
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.checkpoints.gguf.layouts import LayoutOf
from dflash.checkpoints.gguf.stored_values import Tensors
from dflash.checkpoints.gguf.tensor_names import TensorNames
from dflash.config.schema import FULL, SLIDING

# Field of config.json with the number of layers behind the others that are not read.
DRAFTING_LAYERS = "mtp_num_hidden_layers"

Fields = Mapping[str, Any]

_EXPERT_SIZE, ROTATED = "expert_feed_forward_length", "rope.dimension_count"
_GEMMA_27B_LAYERS = 62


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyKeys:
    """Metadata that a family adds to those of all targets, by fields of config.json."""

    intermediate_size: Annotated[int, "feed_forward_length"]

    def fields(self, header: GgufHeader, config: Fields) -> dict[str, Any]:
        """Returns further fields of config.json, given those that all targets have.

        Raises:
          ValueError: A value is not supported; the message begins with its key.
        """
        return dict(vars(self))


@dataclasses.dataclass(frozen=True)
class Family:
    """Architecture of llama.cpp that a target family here computes.

    Attributes:
      layout: Function from a tensor's name, its shape and config.json to its `TensorLayout`.
      join: Function that joins tensors that Hugging Face's layout does not separate.
      keys: Metadata of the family alone.
      implied: Fields of config.json that the architecture implies.
      is_written: Whether models are written, too.
    """

    hf_class: str
    model_type: str
    names: TensorNames = tensor_names.TARGET
    layout: LayoutOf = layouts.as_stored
    join: Callable[[Tensors, Fields], Tensors] = stored_values.unchanged
    keys: type[FamilyKeys] = FamilyKeys
    implied: Fields = dataclasses.field(default_factory=dict)
    is_written: bool = True


def shortest(value: float) -> float:
    """Returns the shortest number with the same value in float32, such as 1e-05."""
    return float(str(np.float32(value)))


def rotated_part(rotated: int, head_dim: int) -> float:
    """Returns `partial_rotary_factor`, so that its product with `head_dim` is not rounded down."""
    part = rotated / head_dim
    return part if int(part * head_dim) == rotated else math.nextafter(part, 2)


def _alternating(layers: int, interval: int) -> list[str]:
    """Returns the kinds of layers, of which every `interval`th sees all positions."""
    return [SLIDING if layer % interval else FULL for layer in range(1, layers + 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gemma3(FamilyKeys):
    """Windows, whose pattern is an interval or one number per layer, and their rotary base."""

    window: Annotated[int, "attention.sliding_window"] = 0
    pattern: Annotated[int | list, "attention.sliding_window_pattern"] = 6
    window_base: Annotated[float, "rope.freq_base_swa"] = 10_000.0
    softcap: Annotated[float | None, "final_logit_softcapping"] = None

    def fields(self, header: GgufHeader, config: Fields) -> dict[str, Any]:
        layers, width = config["num_hidden_layers"], config["head_dim"]
        if layers == _GEMMA_27B_LAYERS:
            width = config["hidden_size"] // config["num_attention_heads"]
        return {
            "intermediate_size": self.intermediate_size,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self.window or None,
            "layer_types": self._layer_types(layers) if self.window else [FULL] * layers,
            "rope_local_base_freq": shortest(self.window_base),
            "final_logit_softcapping": None if self.softcap is None else shortest(self.softcap),
            "query_pre_attn_scalar": width,
        }

    def _layer_types(self, layers: int) -> list[str]:
        pattern = self.pattern
        if type(pattern) is int and pattern > 0:
            return _alternating(layers, pattern)
        if type(pattern) is int or len(pattern) < layers or not {*pattern} <= {0, 1}:
            raise ValueError(f"attention.sliding_window_pattern is {pattern!s:.40}")
        return [SLIDING if slides else FULL for slides in pattern[:layers]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GptOss(FamilyKeys):
    num_local_experts: Annotated[int, "expert_count"]
    num_experts_per_tok: Annotated[int, "expert_used_count"]
    sliding_window: Annotated[int, "attention.sliding_window"]
    intermediate_size: Annotated[int, _EXPERT_SIZE]

    def fields(self, header: GgufHeader, config: Fields) -> dict[str, Any]:
        """Returns windows, experts, and YaRN without the rounding that no file states."""
        scaling = config["rope_scaling"]
        packed = any(
            entry.kind == stored_values.MXFP4 and name.endswith("_exps.weight")
            for name, entry in header.tensors.items()
        )
        return {
            **vars(self),
            "attention_bias": True,
            "layer_types": _alternating(config["num_hidden_layers"], 2),
            "rope_scaling": {**scaling, "truncate": False} if scaling else {"rope_type": "default"},
            **({"quantization_config": {"quant_method": "mxfp4"}} if packed else {}),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Experts(FamilyKeys):
    """Experts; models without dense layers may state the size of experts only."""

    intermediate_size: Annotated[int | None, "feed_forward_length"] = None
    num_experts: Annotated[int, "expert_count"]
    num_experts_per_tok: Annotated[int, "expert_used_count"]
    moe_intermediate_size: Annotated[int, _EXPERT_SIZE]

    def fields(self, header: GgufHeader, config: Fields) -> dict[str, Any]:
        size = self.intermediate_size or self.moe_intermediate_size
        return {**super().fields(header, config), "intermediate_size": size}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Hybrid(FamilyKeys):
    """Linear attention, partial rotation, and layers behind the others that only draft."""

    linear_conv_kernel_dim: Annotated[int, "ssm.conv_kernel"]
    linear_key_head_dim: Annotated[int, "ssm.state_size"]
    linear_num_key_heads: Annotated[int, "ssm.group_count"]
    linear_num_value_heads: Annotated[int, "ssm.time_step_rank"]
    linear_value_dim: Annotated[int, "ssm.inner_size"]
    full_attention_interval: int = 4
    mtp_num_hidden_layers: Annotated[int, "nextn_predict_layers"] = 0
    recurrent_layers: Annotated[list | None, "attention.recurrent_layers"] = None
    rotated_dim: Annotated[int | None, ROTATED] = None
    rope_sections: Annotated[Any, "rope.dimension_sections"] = None  # They tell images from text.

    def fields(self, header: GgufHeader, config: Fields) -> dict[str, Any]:
        heads, values = self.linear_num_value_heads, self.linear_value_dim
        head_dim, interval = config["head_dim"], self.full_attention_interval
        if heads < 1 or values % heads or head_dim < 1:
            raise ValueError(f"ssm.inner_size is {values} for {heads} heads")
        layers = config["num_hidden_layers"] - self.mtp_num_hidden_layers
        pattern = [bool(layer % max(interval, 1)) for layer in range(1, layers + 1)]
        if (self.recurrent_layers or pattern)[:layers] != pattern:
            raise ValueError(f"attention.recurrent_layers is not all layers but every {interval}th")
        rotated = head_dim if self.rotated_dim is None else self.rotated_dim
        return {
            **vars(self),
            "num_hidden_layers": layers,
            "linear_value_head_dim": values // heads,
            "partial_rotary_factor": rotated_part(rotated, head_dim),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HybridExperts(_Experts, _Hybrid):
    shared_expert_intermediate_size: Annotated[int, "expert_shared_feed_forward_length"]


def _hybrid_family(hf_class: str, model_type: str, layout: LayoutOf, **options) -> Family:
    options = {"names": tensor_names.HYBRID, "keys": _HybridExperts, "is_written": False, **options}
    return Family(hf_class, model_type, layout=layout, **options)


_NORMALIZED = {"norm_topk_prob": True}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", layout=layouts.paired_rope),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", keys=_Experts, implied=_NORMALIZED),
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
        keys=_Gemma3,
        is_written=False,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        names=tensor_names.GPT_OSS,
        join=stored_values.alternating_experts,
        keys=_GptOss,
        is_written=False,
    ),
    "qwen3next": _hybrid_family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        layouts.grouped_delta,
        join=stored_values.qkvz,
        implied=_NORMALIZED,
    ),
    "qwen35": _hybrid_family(
        "Qwen3_5ForCausalLM", "qwen3_5_text", layouts.tiled_delta, keys=_Hybrid
    ),
    "qwen35moe": _hybrid_family(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", layouts.tiled_delta, implied=_NORMALIZED
    ),
}
