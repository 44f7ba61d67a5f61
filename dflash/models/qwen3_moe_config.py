"""Config keys and architecture of Qwen3 MoE."""

import dataclasses

from dflash.config.schema import MAX_EXPERTS, TargetArchitecture, TargetConfig, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeArchitecture(TargetArchitecture):
    """Architecture of a Qwen3 MoE target.

    Attributes:
      num_experts: Number of experts per layer.
      num_experts_per_tok: Number of experts that each token is routed to.
      moe_intermediate_size: Hidden width of an expert.
      norm_topk_prob: Whether the routing weights of a token are normalized to sum to 1.
      decoder_sparse_step: Interval of layers with experts; every layer whose number, counted from
        1, is a multiple has them.
      mlp_only_layers: Layers without experts, counted from 0, in spite of `decoder_sparse_step`.
    """

    num_experts: int = option(minimum=1, maximum=MAX_EXPERTS, hf_aliases=("num_local_experts",))
    num_experts_per_tok: int = option(minimum=1, maximum=MAX_EXPERTS)
    moe_intermediate_size: int = option(minimum=1)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = option(1, minimum=1)
    mlp_only_layers: tuple[int, ...] = option((), minimum=0)


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(TargetConfig):
    """Keys of a Qwen3 MoE target."""

    architecture: Qwen3MoeArchitecture | None = None
