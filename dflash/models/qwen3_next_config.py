"""Config keys and architecture of Qwen3-Next and Qwen3.5."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from dflash.config.schema import MAX_EXPERTS, TargetArchitecture, TargetConfig, option

LINEAR, FULL = "linear_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextArchitecture(TargetArchitecture):
    """Architecture of a Qwen3-Next or Qwen3.5 target.

    Attributes:
      layer_types: Attention of each layer; empty for linear attention in all layers but each
        `full_attention_interval`th.
      full_attention_interval: Interval of layers with full attention.
      linear_num_key_heads: Number of query and key heads of linear attention.
      linear_num_value_heads: Number of value heads, a multiple of the key heads.
      linear_key_head_dim: Width of a query or key head.
      linear_value_head_dim: Width of a value head.
      linear_conv_kernel_dim: Rows that the convolution reads, the new one included.
      partial_rotary_factor: Fraction of each head that is rotated, from its first dimension on.
      num_experts: Number of routed experts per layer; 0 for dense MLPs.
      num_experts_per_tok: Number of experts that each token is routed to.
      moe_intermediate_size: Hidden width of a routed expert.
      shared_expert_intermediate_size: Hidden width of the expert that processes every token.
      norm_topk_prob: Whether the routing weights of a token are normalized to sum to 1.
      decoder_sparse_step: Interval of layers with experts.
      mlp_only_layers: Layers without experts, counted from 0, in spite of `decoder_sparse_step`.
    """

    HF_FIXED = (("attn_output_gate", True),)

    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] = ()
    full_attention_interval: int = option(4, minimum=1)
    linear_num_key_heads: int = option(16, minimum=1)
    linear_num_value_heads: int = option(32, minimum=1)
    linear_key_head_dim: int = option(128, minimum=1)
    linear_value_head_dim: int = option(128, minimum=1)
    linear_conv_kernel_dim: int = option(4, minimum=2, maximum=64)
    partial_rotary_factor: float = option(0.25, minimum=0.0, maximum=1.0)
    num_experts: int = option(0, minimum=0, maximum=MAX_EXPERTS)
    num_experts_per_tok: int = option(1, minimum=1, maximum=MAX_EXPERTS)
    moe_intermediate_size: int = option(1, minimum=1)
    shared_expert_intermediate_size: int = option(1, minimum=1)
    norm_topk_prob: bool = True
    decoder_sparse_step: int = option(1, minimum=1)
    mlp_only_layers: tuple[int, ...] = option((), minimum=0)

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def is_full(self, layer: int) -> bool:
        """Returns whether layer number `layer` has full attention."""
        if self.layer_types:
            return self.layer_types[layer] == FULL
        return (layer + 1) % self.full_attention_interval == 0

    def has_experts(self, layer: int) -> bool:
        """Returns whether layer number `layer` has experts instead of a dense MLP."""
        is_sparse = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and is_sparse and layer not in self.mlp_only_layers

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        depth, types = self.num_hidden_layers, self.layer_types
        if types and len(types) != depth:
            yield ("layer_types",), f"{len(types)} types for num_hidden_layers={depth} layers"
        elif not any(map(self.is_full, range(depth))):
            field = "layer_types" if types else "full_attention_interval"
            yield (field,), f"no layer has full attention; expected at least one {FULL!r} layer"
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            message = f"{values} is no multiple of linear_num_key_heads={keys}"
            yield ("linear_num_value_heads", "linear_num_key_heads"), message
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            yield (
                ("partial_rotary_factor",),
                f"{self.partial_rotary_factor} rotates {self.rotary_dim} of {self.head_dim} head "
                "dimensions; expected a positive even number",
            )
        if 0 < self.num_experts < self.num_experts_per_tok:
            message = f"{self.num_experts_per_tok} exceeds num_experts={self.num_experts}"
            yield ("num_experts_per_tok", "num_experts"), message


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig(TargetConfig):
    """Keys of a Qwen3-Next or Qwen3.5 target."""

    architecture: Qwen3NextArchitecture | None = None
