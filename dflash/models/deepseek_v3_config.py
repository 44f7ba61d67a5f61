"""Config keys and architecture of DeepSeek-V3 and Kimi K2."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash.config.schema import MAX_EXPERTS, TargetArchitecture, TargetConfig, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV3Architecture(TargetArchitecture):
    """Architecture of a DeepSeek-V3 or Kimi K2 target.

    The fields `head_dim` and `num_key_value_heads` of the decoder are not used.

    Attributes:
      q_lora_rank: Rank of the query projection; None for a projection of full rank.
      kv_lora_rank: Width of the latent row that keys and values are projected from.
      qk_nope_head_dim: Width of the part of each query and key head that is not rotated.
      qk_rope_head_dim: Width of the rotated part.
      v_head_dim: Width of a value head.
      rope_interleave: Whether rotated pairs are adjacent dimensions, not half a head apart.
      n_routed_experts: Number of routed experts per layer.
      n_shared_experts: Number of experts per layer that process every token.
      num_experts_per_tok: Number of routed experts per token.
      moe_intermediate_size: Hidden width of an expert.
      first_k_dense_replace: Number of first layers with a dense MLP instead of experts.
      n_group: Number of groups that the routed experts are divided into.
      topk_group: Number of groups that a token's experts are chosen from.
      norm_topk_prob: Whether the routing weights of a token are normalized to sum to 1.
      routed_scaling_factor: Factor on the output of the routed experts.
    """

    HF_FIXED = (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1))

    q_lora_rank: int | None = option(None, minimum=1)
    kv_lora_rank: int = option(minimum=1)
    qk_nope_head_dim: int = option(minimum=1)
    qk_rope_head_dim: int = option(minimum=2)
    v_head_dim: int = option(minimum=1)
    rope_interleave: bool = True
    n_routed_experts: int = option(
        minimum=1, maximum=MAX_EXPERTS, hf_aliases=("num_local_experts",)
    )
    n_shared_experts: int = option(0, minimum=0)
    num_experts_per_tok: int = option(minimum=1, maximum=MAX_EXPERTS)
    moe_intermediate_size: int = option(minimum=1)
    first_k_dense_replace: int = option(0, minimum=0)
    n_group: int = option(1, minimum=1)
    topk_group: int = option(1, minimum=1)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = option(1.0, minimum=0.0)

    @classmethod
    def hf_overrides(cls, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replaces two fields that published files disagree on and latent attention ignores."""
        return {"head_dim": own["qk_rope_head_dim"], "num_key_value_heads": None}


@dataclasses.dataclass(frozen=True)
class DeepseekV3Config(TargetConfig):
    """Keys of a DeepSeek-V3 or Kimi K2 target."""

    architecture: DeepseekV3Architecture | None = None
