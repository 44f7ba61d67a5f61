"""MiniMax-M2: experts in every layer, norms over all heads at once, and partial rotation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.checkpoints import hf_config
from dflash.checkpoints.tensor_map import Source, Stack
from dflash.layers import moe, rotary
from dflash.layers.attention import Attention
from dflash.layers.linear import RMSNorm
from dflash.layers.transformer import grouped_attention
from dflash.models.config import MiniMaxM2Architecture
from dflash.models.decoder import Decoder

# Parts of a parameter's path whose names differ from those in checkpoints, in order.
_NAMES = {
    ".query_norm.": ".q_norm.",
    ".key_norm.": ".k_norm.",
    ".mlp.gate.e_score": ".mlp.e_score",
    ".mlp.": ".block_sparse_moe.",
    ".experts.gate_proj.": ".experts.w1.",
    ".experts.up_proj.": ".experts.w3.",
    ".experts.down_proj.": ".experts.w2.",
}
_ATTENTION_TYPES, _FRACTION = "attn_type_list", "partial_rotary_factor"


class WholeNormAttention(Attention):
    """Attention that normalizes queries and keys before they are split into heads.

    The compiler sums the mean squares over devices that share the heads.
    """

    def __init__(self, width: int, *, num_heads, num_kv_heads, head_dim, eps, **build):
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        super().__init__(width, **sizes, eps=eps, **build)
        self.query_norm = RMSNorm(num_heads * head_dim, eps, **build)
        self.key_norm = RMSNorm(num_kv_heads * head_dim, eps, **build)

    def _heads(self, product, parts, cos_sin):
        norm = {"q": self.query_norm, "k": self.key_norm}.get(parts)
        return super()._heads(product if norm is None else norm(product), parts, cos_sin)

    def join_projections(self) -> None:
        """Leaves projections apart: in a joined one, no device has the columns of one part."""


class MiniMaxM2(Decoder):
    """Target family `MiniMaxM2ForCausalLM`, such as MiniMax-M2.5 and M2.7.

    Source: transformers 5.24, models/minimax_m2/modular_minimax_m2.py.
    """

    hf_architectures = ("MiniMaxM2ForCausalLM",)
    hf_model_type = "minimax_m2"
    qk_norm = False
    architecture_class = MiniMaxM2Architecture

    def make_attention(self, i, **build) -> Attention:
        return grouped_attention(self.arch, WholeNormAttention, **build)

    def make_mlp(self, i, **build) -> nnx.Module:
        arch = self.arch
        choice = arch.num_local_experts, arch.num_experts_per_tok
        routing = moe.Routing(*choice, scoring="sigmoid", has_correction=True)
        mlp = moe.SparseMlp(routing, arch.hidden_size, arch.intermediate_size, **build)
        mlp.gate = moe.Router(arch.hidden_size, routing, **build | {"dtype": jnp.float32})
        return mlp

    def rotary_angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        rotated = dataclasses.replace(self.arch, head_dim=self.arch.rotary_dim)
        return rotary.angles(positions, rotated)

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Returns names of the layers for multi-token prediction, and those of `Decoder`."""
        first = self.arch.num_hidden_layers
        layers = range(first, first + self.arch.num_mtp_modules)
        return (*super().ignored_checkpoint_names, *(f"model.layers.{i}.*" for i in layers))

    def checkpoint_name(self, path: str) -> Source:
        for name, hf_name in _NAMES.items():
            path = path.replace(name, hf_name)
        names = moe.stacked_names(path, self.arch.num_local_experts)
        if names is not None:
            return Stack(tuple(f"model.{name}" for name in names))
        is_bare = path.endswith(".e_score_correction_bias")
        return f"model.{path}" if is_bare else super().checkpoint_name(path)

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> MiniMaxM2Architecture:
        """Reads config.json, which states the rotated part of a head in one of three places."""
        types = config.get(_ATTENTION_TYPES)
        if isinstance(types, list):  # 1 is full attention, 0 linear attention.
            hf_config.check_only(config, _ATTENTION_TYPES, [1] * len(types))
        own = hf_config.read_fields(config, _Rotary)
        rope = hf_config.read_fields(hf_config.read_group(config, "rope_parameters"), _Rotary)
        factor = rope.partial_rotary_factor or own.partial_rotary_factor
        if factor is None and own.rotary_dim is not None:
            factor = own.rotary_dim / own.head_dim
        return super().architecture_from_hf({**config, _FRACTION: factor})


@dataclasses.dataclass(frozen=True)
class _Rotary:
    """Fields of config.json that state how much of a head is rotated."""

    partial_rotary_factor: float | None = None
    rotary_dim: int | None = None
    head_dim: int = 128
