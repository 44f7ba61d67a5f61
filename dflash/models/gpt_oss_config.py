"""Config keys and architecture of gpt-oss."""

import dataclasses

from dflash.config.schema import MAX_EXPERTS, TargetConfig, option
from dflash.models.windows_config import FULL, SLIDING, WindowedArchitecture


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssArchitecture(WindowedArchitecture):
    """Architecture of a gpt-oss target.

    `intermediate_size` is that of an expert. If `layer_types` is not given, every other layer
    slides, beginning with the first.

    Attributes:
      num_local_experts: Number of experts per layer.
      num_experts_per_tok: Number of experts that each token is routed to.
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


@dataclasses.dataclass(frozen=True)
class GptOssConfig(TargetConfig):
    """Keys of a gpt-oss target."""

    architecture: GptOssArchitecture | None = None
