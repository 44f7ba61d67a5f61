"""Config keys and architecture of Gemma 3."""

import dataclasses

from dflash.config.schema import TargetConfig, option
from dflash.models.windows_config import WindowedArchitecture


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Architecture(GemmaArchitecture):
    """Architecture of a Gemma 3 target.

    Attributes:
      query_pre_attn_scalar: Attention scores are divided by its square root.
    """

    HF_FIXED = (*GemmaArchitecture.HF_FIXED, ("use_bidirectional_attention", False))

    query_pre_attn_scalar: int = option(256, minimum=1)


@dataclasses.dataclass(frozen=True)
class Gemma3Config(TargetConfig):
    """Keys of a Gemma 3 target."""

    architecture: Gemma3Architecture | None = None
