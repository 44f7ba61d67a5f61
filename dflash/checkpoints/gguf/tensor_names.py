"""Names of tensors in GGUF files and in Hugging Face's layout.

Source: llama.cpp, src/llama-arch.cpp, and the converters under conversion/.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

_IN_GGUF = re.compile(r"blk\.(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Names of the tensors of a kind of model.

    Attributes:
      top: Hugging Face's names of the tensors outside layers, by ggml's.
      layer: Hugging Face's names within a layer, by ggml's.
      layers: Hugging Face's prefix of the number of a layer.
      stacked: Hugging Face's names within an expert, by ggml's of the stack of all experts.
    """

    top: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str
    stacked: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_hf(self, name: str) -> str | None:
        """Returns Hugging Face's name of a tensor, given ggml's; None if it is unknown."""
        match = _IN_GGUF.fullmatch(name)
        if match is None:
            return self.top.get(name)
        inner = self.layer.get(match[2])
        return inner and f"{self.layers}.{match[1]}.{inner}"

    def to_ggml(self, name: str) -> str | None:
        """Returns ggml's name of a tensor, given Hugging Face's; None if it is unknown."""
        match = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.(.+)", name)
        top, layer = self._inverse
        if match is None:
            return top.get(name)
        inner = layer.get(match[2])
        return inner and f"blk.{match[1]}.{inner}"

    def experts(self, name: str, count: int) -> Iterator[str]:
        """Yields Hugging Face's names of the experts that a tensor stacks."""
        match = _IN_GGUF.fullmatch(name)
        stem = match and self.stacked.get(match[2])
        for expert in range(count if stem else 0):
            yield f"{self.layers}.{match[1]}.mlp.experts.{expert}.{stem}"

    def stack_of(self, name: str) -> str | None:
        """Returns ggml's name of the stack of an expert's tensor; None for any other tensor."""
        match = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.mlp\.experts\.\d+\.(.+)", name)
        stems = (ggml for ggml, hf in self.stacked.items() if match and match[2] == hf)
        return next((f"blk.{match[1]}.{stem}" for stem in stems), None)

    @functools.cached_property
    def _inverse(self) -> tuple[dict[str, str], dict[str, str]]:
        top, layer = ({hf: ggml for ggml, hf in names.items()} for names in (self.top, self.layer))
        return top, layer


def _weights(names: Mapping[str, str]) -> dict[str, str]:
    return {f"{ggml}.weight": f"{hf}.weight" for ggml, hf in names.items()}


def layer_of(name: str) -> int | None:
    """Returns the number of the layer that a tensor of a file belongs to; None for none."""
    match = _IN_GGUF.fullmatch(name)
    return match and int(match[1])


_DENSE_LAYER = _weights(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)

_BIASES = {f"attn_{name}.bias": f"self_attn.{name}_proj.bias" for name in "qkv"}
_TOP = _weights(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_STACKED = _weights(
    {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
)
_MOVED_NORM = {"ffn_norm.weight", "post_attention_norm.weight"}  # Names of one norm or of two.


def _target(layer: Mapping[str, str], *, stacked: Mapping[str, str] = _STACKED) -> TensorNames:
    return TensorNames(top=_TOP, layer=layer, layers="model.layers", stacked=stacked)


_NORM_AFTER_ATTENTION = {
    name: hf for name, hf in _DENSE_LAYER.items() if name not in _MOVED_NORM
} | {"post_attention_norm.weight": "post_attention_layernorm.weight"}

TARGET = _target(_DENSE_LAYER | _BIASES | _weights({"ffn_gate_inp": "mlp.gate"}))

GEMMA3 = _target(
    _DENSE_LAYER
    | _weights(
        {
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    )
)

GPT_OSS = _target(
    _NORM_AFTER_ATTENTION
    | _BIASES
    | {
        "attn_output.bias": "self_attn.o_proj.bias",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp.weight": "mlp.router.weight",
        "ffn_gate_inp.bias": "mlp.router.bias",
    }
    | {
        f"ffn_{name}_exps.{leaf}": f"mlp.experts.{name}_proj{end}"
        for name in ("gate", "up", "down")
        for leaf, end in (("weight", ""), ("bias", "_bias"))
    },
    stacked={},
)

# Qwen3-Next and Qwen3.5, dense or with experts.
HYBRID = _target(
    _NORM_AFTER_ATTENTION
    | _weights(
        {
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        }
    )
    | {
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    }
)

DRAFTER = TensorNames(
    top=_weights(
        {
            "fc": "fc",
            "enc.output_norm": "hidden_norm",
            "output_norm": "norm",
            "output": "lm_head",
            "selector_hidden": "candidate_selector.hidden_projection",
            "markov_w1": "markov_head.markov_w1",
            "markov_w2": "markov_head.markov_w2",
            "conf_proj": "confidence_head.proj",
        }
    )
    | {
        "d2t": "d2t",
        "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
        "selector_successor.weight": "candidate_selector.successor_codebook",
        "conf_proj.bias": "confidence_head.proj.bias",
    },
    layer=_DENSE_LAYER
    | _weights(
        {
            "attn_conv_proj": "attention_conv.kernel_projection",
            "ffn_conv_proj": "mlp_conv.kernel_projection",
        }
    )
    | {
        "attn_conv_base": "attention_conv.base_kernel",
        "ffn_conv_base": "mlp_conv.base_kernel",
        "attn_sinks.weight": "self_attn.attention_sink_bias",
    },
    layers="layers",
)
