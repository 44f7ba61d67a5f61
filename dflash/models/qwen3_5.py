"""Qwen3.5 and 3.6, dense or with experts: Qwen3-Next with other tensors, and a vision tower.

Published files hold a vision tower beside the language model. It is not read: prompts are text.
"""

from typing import Any

from dflash.checkpoints.tensor_map import Source, TensorRows
from dflash.layers.gated_delta_net import DeltaShape
from dflash.models.config import Qwen3NextArchitecture
from dflash.models.language_model import LanguageModel
from dflash.models.qwen3_next import Qwen3Next


class Qwen35Text(Qwen3Next):
    """Target family `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM`, the language model alone."""

    hf_architectures = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
    hf_model_type = "qwen3_5_text"

    def _projection_source(self, prefix: str, name: str, shape: DeltaShape) -> Source | None:
        keys, total = shape.key_size, 2 * shape.key_size + shape.value_size
        joined = {"q_proj": (0, keys), "k_proj": (keys, 2 * keys), "v_proj": (2 * keys, total)}
        if name in joined:
            return TensorRows(f"{prefix}.in_proj_qkv.weight", *joined[name], of=total)
        alone = {"z_proj": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a"}
        return f"{prefix}.{alone[name]}.weight" if name in alone else None

    @classmethod
    def config_to_hf(cls, arch: Qwen3NextArchitecture) -> dict[str, Any]:
        config = super().config_to_hf(arch)
        if not arch.num_experts:
            return config
        model_type = cls.hf_model_type.replace("qwen3_5", "qwen3_5_moe")
        return config | {"architectures": [cls.hf_architectures[1]], "model_type": model_type}


class Qwen35(LanguageModel, Qwen35Text):
    """Language model of `Qwen3_5ForConditionalGeneration` and its counterpart with experts."""

    hf_architectures = (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    )
    hf_model_type = "qwen3_5"
    text_class = Qwen35Text
    tower_names = ("model.visual.*",)
