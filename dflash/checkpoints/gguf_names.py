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
    """

    top: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str

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

    @functools.cached_property
    def _inverse(self) -> tuple[dict[str, str], dict[str, str]]:
        top, layer = ({hf: ggml for ggml, hf in names.items()} for names in (self.top, self.layer))
        return top, layer


def _weights(names: Mapping[str, str]) -> dict[str, str]:
    return {f"{ggml}.weight": f"{hf}.weight" for ggml, hf in names.items()}


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

_BIASES = {f"attn_{name}.bias": f"self_attn.{name}_proj.bias" for name in "qkv"}  # Qwen2's.

TARGET = TensorNames(
    top=_weights(
        {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    ),
    layer=_DENSE_LAYER | _BIASES | _weights({"ffn_gate_inp": "mlp.gate"}),
    layers="model.layers",
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

_STACKED = {
    "ffn_gate_exps.weight": "gate_proj.weight",
    "ffn_up_exps.weight": "up_proj.weight",
    "ffn_down_exps.weight": "down_proj.weight",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(.+)")


def experts(name: str, count: int) -> Iterator[str]:
    """Yields Hugging Face's names of the experts that a tensor of a target stacks."""
    match = _IN_GGUF.fullmatch(name)
    stem = match and _STACKED.get(match[2])
    for expert in range(count if stem else 0):
        yield f"model.layers.{match[1]}.mlp.experts.{expert}.{stem}"


def stack_of(name: str) -> str | None:
    """Returns ggml's name of the stack of an expert's tensor; None for any other tensor."""
    match = _EXPERT.fullmatch(name)
    stems = (ggml for ggml, hf in _STACKED.items() if match and match[3] == hf)
    return next((f"blk.{match[1]}.{stem}" for stem in stems), None)
