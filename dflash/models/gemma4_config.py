"""Config keys and architecture of Gemma 4."""

import dataclasses
from collections.abc import Iterator

from dflash.config.schema import MAX_EXPERTS, TargetConfig, option
from dflash.models.gemma3_config import GemmaArchitecture
from dflash.models.windows_config import FULL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Architecture(GemmaArchitecture):
    """Architecture of a Gemma 4 target: the models without embeddings for each layer.

    The fields `head_dim` and `num_key_value_heads` are those of sliding layers.

    Attributes:
      global_head_dim: Width of a head of full layers.
      num_global_key_value_heads: Key and value heads of full layers, if their values are shared;
        None for `num_key_value_heads`.
      attention_k_eq_v: Whether full layers compute values from the projection of keys.
      partial_rotary_factor: Fraction of the head of full layers that is rotated.
      enable_moe_block: Whether layers have routed experts beside their dense MLP.
      num_experts: Number of routed experts per layer.
      top_k_experts: Number of experts that each token is routed to.
      moe_intermediate_size: Hidden width of a routed expert.
    """

    HF_FIXED = (
        *GemmaArchitecture.HF_FIXED,
        ("hidden_size_per_layer_input", 0),
        ("num_kv_shared_layers", 0),
    )

    global_head_dim: int = option(512, minimum=2)
    num_global_key_value_heads: int | None = option(None, minimum=1)
    attention_k_eq_v: bool = False
    partial_rotary_factor: float = option(0.25, minimum=0.0, maximum=1.0)
    enable_moe_block: bool = False
    num_experts: int = option(1, minimum=1, maximum=MAX_EXPERTS)
    top_k_experts: int = option(1, minimum=1, maximum=MAX_EXPERTS)
    moe_intermediate_size: int = option(1, minimum=1)

    def kv_heads(self, layer: int) -> int:
        """Returns the number of key and value heads of layer number `layer`."""
        if self.is_sliding(layer) or not self.attention_k_eq_v:
            return self.num_key_value_heads
        return self.num_global_key_value_heads or self.num_key_value_heads

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from super().problems()
        kv_heads, key = self.num_global_key_value_heads, "num_global_key_value_heads"
        if kv_heads and self.num_attention_heads % kv_heads:
            heads = self.num_attention_heads
            yield (key,), f"num_attention_heads={heads} does not divide into {kv_heads} groups"
        if self.global_head_dim % 2:
            size = self.global_head_dim
            yield ("global_head_dim",), f"expected an even number (rotary halves), got {size}"
        if self.layer_types and self.layer_types[-1] != FULL:
            yield ("layer_types",), f"the last layer is {self.layer_types[-1]!r}, expected {FULL!r}"
        if self.num_experts < self.top_k_experts:
            message = f"{self.top_k_experts} exceeds num_experts={self.num_experts}"
            yield ("top_k_experts", "num_experts"), message


@dataclasses.dataclass(frozen=True)
class Gemma4Config(TargetConfig):
    """Keys of a Gemma 4 target."""

    architecture: Gemma4Architecture | None = None
