"""Architectures of the target families that have fields of their own."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from dflash.config.schema import (
    FULL,
    MAX_EXPERTS,
    MAX_LAYERS,
    SLIDING,
    LentHeads,
    TargetArchitecture,
    option,
)

LINEAR = "linear_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedArchitecture(TargetArchitecture):
    """Architecture in which all or some layers attend to a sliding window.

    Attributes:
      sliding_window: Positions up to its own that a row of a sliding layer sees; None for all.
      layer_types: Kind of each layer; empty if all layers slide.
    """

    sliding_window: int | None = option(None, minimum=1)
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()

    def is_sliding(self, layer: int) -> bool:
        """Returns whether layer number `layer` is a sliding one."""
        return not self.layer_types or self.layer_types[layer] == SLIDING

    def window(self, layer: int) -> int | None:
        """Returns the window of layer number `layer`; None if it sees all positions."""
        return self.sliding_window if self.is_sliding(layer) else None

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            names, layers = len(self.layer_types), self.num_hidden_layers
            yield ("layer_types",), f"names {names} layers, but num_hidden_layers is {layers}"
        if SLIDING in self.layer_types and self.sliding_window is None:
            layer = self.layer_types.index(SLIDING)
            yield ("sliding_window",), f"missing, but layer_types[{layer}] is {SLIDING!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Architecture(TargetArchitecture):
    """Architecture of a SmolLM3 target.

    Attributes:
      no_rope_layers: For each layer, 1 if its attention has rotary position embedding and 0 if it
        has none; empty if every layer has it but the ones that `no_rope_layer_interval` names.
      no_rope_layer_interval: Every layer whose number, counted from 1, is a multiple has none.
    """

    no_rope_layers: tuple[int, ...] = option((), minimum=0, maximum=1)
    no_rope_layer_interval: int = option(4, minimum=1)

    def rotates(self, layer: int) -> bool:
        """Returns whether layer number `layer` has rotary position embedding."""
        if self.no_rope_layers:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        names, layers = len(self.no_rope_layers), self.num_hidden_layers
        if 0 < names < layers:
            yield ("no_rope_layers",), f"names {names} layers, but num_hidden_layers is {layers}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssArchitecture(WindowedArchitecture):
    """Architecture of a gpt-oss target.

    `intermediate_size` is that of an expert. If `layer_types` is not given, every other layer
    slides, beginning with the first.

    Attributes:
      swiglu_limit: Bound on the gate and up projections of an expert.
      swiglu_alpha: Factor on the gate in the sigmoid.
    """

    HF_FIXED = (("attention_bias", True),)

    sliding_window: int | None = option(128, minimum=1)
    num_local_experts: int = option(minimum=1, maximum=MAX_EXPERTS, hf_aliases=("num_experts",))
    num_experts_per_tok: int = option(
        minimum=1, maximum=MAX_EXPERTS, hf_aliases=("experts_per_token",)
    )
    swiglu_limit: float = option(7.0, minimum=0.0)
    swiglu_alpha: float = 1.702

    def __post_init__(self):
        if not self.layer_types:
            kinds = ((SLIDING, FULL)[layer % 2] for layer in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", tuple(kinds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaArchitecture(WindowedArchitecture):
    """Architecture fields of Gemma 3 and Gemma 4.

    Attributes:
      rope_local_base_freq: Base of the rotary embedding of sliding layers; `rope_theta` and
        `rope_scaling` are those of the other layers.
      final_logit_softcapping: Bound of the logits, which a scaled tanh enforces; None for none.
    """

    HF_FIXED = (
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("attention_bias", False),
        ("attn_logit_softcapping", None),
    )

    rope_local_base_freq: float = option(1e4, minimum=1.0)
    final_logit_softcapping: float | None = option(None, minimum=1e-3)

    @property
    def lent(self) -> LentHeads:
        return LentHeads(self.hidden_size**0.5, bound=self.final_logit_softcapping)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Architecture(GemmaArchitecture):
    """Architecture of Gemma 3; attention scores are divided by √`query_pre_attn_scalar`."""

    HF_FIXED = (*GemmaArchitecture.HF_FIXED, ("use_bidirectional_attention", False))

    query_pre_attn_scalar: int = option(256, minimum=1)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuseGlimmerArchitecture(WindowedArchitecture):
    """Architecture of a Muse Glimmer target.

    If `layer_types` or `layer_rope_theta` is not given, every fourth layer, counted back from the
    last, is full or has no rotary embedding.

    Attributes:
      layer_rope_theta: For each layer, 0 if its attention has no rotary embedding. Other values
        change nothing: the base is `rope_theta`, as in transformers.
      post_norm_eps: Epsilon of the norms behind attention and MLP.
      qk_scale_factor: Factor on normalized queries.
      output_multiplier: Factor on the logits, before their bound.
      final_logit_softcapping: Bound of the logits, which a scaled tanh enforces.
      image_token_id: Token in place of an image, which is embedded as token 0.
      video_token_id: Token in place of a video, which is embedded as token 0.
    """

    HF_FIXED = (("hidden_activation", "silu"), ("attention_bias", False))

    sliding_window: int | None = option(2048, minimum=1)
    layer_rope_theta: tuple[float, ...] = option((), minimum=0.0)
    post_norm_eps: float = option(1e-8, minimum=0.0)
    qk_scale_factor: float = option(3.87, minimum=1e-3)
    output_multiplier: float = option(26**-0.5, minimum=1e-6)
    final_logit_softcapping: float = option(20.0, minimum=1e-3)
    image_token_id: int = option(200_092, minimum=0)
    video_token_id: int = option(200_091, minimum=0)

    def __post_init__(self):
        fourth = [(self.num_hidden_layers - 1 - i) % 4 == 0 for i in range(self.num_hidden_layers)]
        if not self.layer_types:
            kinds = tuple(FULL if is_fourth else SLIDING for is_fourth in fourth)
            object.__setattr__(self, "layer_types", kinds)
        if not self.layer_rope_theta:
            bases = tuple(0.0 if is_fourth else self.rope_theta for is_fourth in fourth)
            object.__setattr__(self, "layer_rope_theta", bases)

    @property
    def lent(self) -> LentHeads:
        return LentHeads(1.0, self.output_multiplier, self.final_logit_softcapping)

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from super().problems()
        names, layers = len(self.layer_rope_theta), self.num_hidden_layers
        if names != layers:
            yield ("layer_rope_theta",), f"names {names} layers, but num_hidden_layers is {layers}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeArchitecture(TargetArchitecture):
    """Architecture of a Qwen3 MoE target.

    Attributes:
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

    def has_experts(self, layer: int) -> bool:
        """Returns whether layer number `layer` has experts instead of a dense MLP."""
        is_sparse = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and is_sparse and layer not in self.mlp_only_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartlyRotatedArchitecture(TargetArchitecture):
    """Architecture in which only the first dimensions of a head are rotated.

    Attributes:
      partial_rotary_factor: Fraction of each head that is rotated, from its first dimension on.
    """

    partial_rotary_factor: float = option(1.0, minimum=0.0, maximum=1.0)

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from super().problems()
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            yield (
                ("partial_rotary_factor",),
                f"{self.partial_rotary_factor} rotates {self.rotary_dim} of {self.head_dim} head "
                "dimensions; expected a positive even number",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM2Architecture(PartlyRotatedArchitecture):
    """Architecture of a MiniMax-M2 target; `intermediate_size` is that of an expert.

    Attributes:
      num_mtp_modules: Layers for multi-token prediction behind the last one, which are not read.
    """

    HF_FIXED = (
        ("qk_norm_type", "per_layer"),
        ("use_qk_norm", True),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("norm_topk_prob", True),
        ("shared_intermediate_size", 0),
        ("sliding_window", None),
    )

    num_local_experts: int = option(minimum=1, maximum=MAX_EXPERTS, hf_aliases=("num_experts",))
    num_experts_per_tok: int = option(minimum=1, maximum=MAX_EXPERTS)
    num_mtp_modules: int = option(0, minimum=0, maximum=MAX_LAYERS)

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from super().problems()
        if self.num_local_experts < self.num_experts_per_tok:
            message = f"{self.num_experts_per_tok} exceeds num_local_experts="
            yield ("num_experts_per_tok",), f"{message}{self.num_local_experts}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextArchitecture(PartlyRotatedArchitecture, Qwen3MoeArchitecture):
    """Architecture of a Qwen3-Next or Qwen3.5 target.

    Attributes:
      layer_types: Attention of each layer; empty for linear attention in all layers but each
        `full_attention_interval`th.
      full_attention_interval: Interval of layers with full attention.
      linear_num_key_heads: Number of query and key heads of linear attention.
      linear_num_value_heads: Number of value heads, a multiple of the key heads.
      linear_conv_kernel_dim: Rows that the convolution reads, the new one included.
      num_experts: Number of routed experts per layer; 0 for dense MLPs.
      shared_expert_intermediate_size: Hidden width of the expert that processes every token.
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

    def is_full(self, layer: int) -> bool:
        """Returns whether layer number `layer` has full attention."""
        if self.layer_types:
            return self.layer_types[layer] == FULL
        return (layer + 1) % self.full_attention_interval == 0

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from super().problems()
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
        if 0 < self.num_experts < self.num_experts_per_tok:
            message = f"{self.num_experts_per_tok} exceeds num_experts={self.num_experts}"
            yield ("num_experts_per_tok", "num_experts"), message


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV3Architecture(TargetArchitecture):
    """Architecture of a DeepSeek-V3 or Kimi K2 target.

    The fields `head_dim` and `num_key_value_heads` of the decoder are not used.

    Attributes:
      q_lora_rank: Rank of the query projection; None for a projection of full rank.
      kv_lora_rank: Width of the latent row that keys and values are projected from.
      qk_nope_head_dim: Width of the part of each query and key head that is not rotated.
      rope_interleave: Whether rotated pairs are adjacent dimensions, not half a head apart.
      n_shared_experts: Number of experts per layer that process every token.
      first_k_dense_replace: Number of first layers with a dense MLP instead of experts.
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
    def hf_overrides(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replaces two fields that published files disagree on and latent attention ignores."""
        return {"head_dim": fields["qk_rope_head_dim"], "num_key_value_heads": None}
