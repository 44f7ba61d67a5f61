"""Config keys and shape of LiLiCorr drafters, which add a network over likely tokens to DFlash."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from dflash.checkpoints import hf_config
from dflash.config.schema import MAX_BLOCK_SIZE, TargetArchitecture, option, option_like, subset
from dflash.drafters import base_config
from dflash.drafters.base_config import (
    MAX_LAYERS,
    MAX_RANK,
    MAX_WIDTH,
    BlockDrafterConfig,
    ConditionalTree,
)
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape
from dflash.drafters.layouts_config import GROUP

_WIDEST = 1024  # Width of the published networks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiLiCorrFields:
    """Fields of config.json that LiLiCorr adds to DFlash's.

    Attributes:
      lilicorr_candidate_topk: Number of candidates per draft position, k.
      lilicorr_hidden_size: Width of the network; 0 for that of the drafter.
      lilicorr_num_layers: Number of layers of the network.
      lilicorr_num_heads: Number of attention heads of the network.
      lilicorr_mlp_ratio: Width of the network's MLPs over its own.
      lilicorr_factor_dim: Size of the vectors that a transition is scored by.
      lilicorr_vector_eps: Smallest length that these vectors are divided by.
      lilicorr_logit_scale: Factor from the cosine of two vectors to a logit.
      conv_kernel_size: Number of taps of DFlash2's convolutions; 0 for none.
      conv_group_size: Number of channels that share a correction of the taps; 0 for none.
    """

    lilicorr_candidate_topk: int = option(minimum=1, maximum=1024)
    lilicorr_hidden_size: int = option(minimum=0, maximum=MAX_WIDTH)
    lilicorr_num_layers: int = option(minimum=1, maximum=MAX_LAYERS)
    lilicorr_num_heads: int = option(minimum=1, maximum=2**16)
    lilicorr_mlp_ratio: float = option(minimum=0.01, maximum=64.0)
    lilicorr_factor_dim: int = option(minimum=1, maximum=MAX_RANK)
    lilicorr_vector_eps: float = option(minimum=1e-12, maximum=0.5)
    lilicorr_logit_scale: float = option(minimum=1e-3, maximum=1e4)
    conv_kernel_size: int = option(0, minimum=0, maximum=MAX_BLOCK_SIZE)
    conv_group_size: int = option(0, minimum=0, maximum=MAX_WIDTH)


@dataclasses.dataclass(frozen=True)
class LiLiCorrArchitecture(DFlashArchitecture):
    """Architecture of a fresh LiLiCorr drafter."""

    lilicorr_candidate_topk: int = option_like(LiLiCorrFields, "lilicorr_candidate_topk", 8)
    # None: the drafter's width, at most 1024.
    lilicorr_hidden_size: int | None = option_like(LiLiCorrFields, "lilicorr_hidden_size", None)
    lilicorr_num_layers: int = option_like(LiLiCorrFields, "lilicorr_num_layers", 2)
    lilicorr_num_heads: int = option_like(LiLiCorrFields, "lilicorr_num_heads", 8)
    lilicorr_mlp_ratio: float = option_like(LiLiCorrFields, "lilicorr_mlp_ratio", 2.0)
    # None: the width of the network.
    lilicorr_factor_dim: int | None = option_like(LiLiCorrFields, "lilicorr_factor_dim", None)
    lilicorr_vector_eps: float = option_like(LiLiCorrFields, "lilicorr_vector_eps", 1e-4)
    lilicorr_logit_scale: float = option_like(LiLiCorrFields, "lilicorr_logit_scale", 8.0)
    conv_kernel_size: int = option_like(LiLiCorrFields, "conv_kernel_size", 0)
    conv_group_size: int = option_like(LiLiCorrFields, "conv_group_size", 0)

    def shape_fields(self, target: TargetArchitecture) -> dict[str, Any]:
        """Returns the fields of `LiLiCorrShape`; see `DFlashArchitecture.shape_fields`."""
        own = subset(self, LiLiCorrFields)
        width = own["lilicorr_hidden_size"] or min(target.hidden_size, _WIDEST)
        own["lilicorr_hidden_size"] = width
        own["lilicorr_factor_dim"] = own["lilicorr_factor_dim"] or width
        return super().shape_fields(target) | own


@dataclasses.dataclass(frozen=True)
class LiLiCorrConfig(BlockDrafterConfig):
    """Keys of a LiLiCorr drafter."""

    name: str = "lilicorr"
    tree: ConditionalTree | None = None  # None: a chain.
    architecture: LiLiCorrArchitecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiLiCorrShape(DFlashShape, LiLiCorrFields):
    """Contents of a LiLiCorr checkpoint's config.json."""

    layout: ClassVar[Mapping[str, Any]] = {"projector": "lilicorr"}

    @property
    def network_width(self) -> int:
        """Width of the network over candidates."""
        return self.lilicorr_hidden_size or self.decoder.hidden_size

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        hf_config.check_only(config, "has_own_lm_head", False)
        hf_config.check_only(config[GROUP], "lilicorr_enabled", True)
        own = hf_config.read_fields({**config, **config[GROUP]}, LiLiCorrFields)
        return super()._read(config) | vars(own)

    def to_hf(self) -> dict[str, Any]:
        """Returns config.json fields in ModelOpt's layout; see `DrafterShape.to_hf`."""
        config, own = super().to_hf(), subset(self, LiLiCorrFields)
        if not self.conv_kernel_size:  # Files without convolutions leave these fields out.
            del own["conv_kernel_size"], own["conv_group_size"]
        config[GROUP] |= {"projector_type": "lilicorr", "lilicorr_enabled": True} | own
        return config

    @classmethod
    def for_target(cls, target: TargetArchitecture, options: LiLiCorrArchitecture | None) -> Self:
        """Returns the shape of a fresh LiLiCorr drafter; see `DrafterShape.for_target`."""
        return super().for_target(target, options or LiLiCorrArchitecture())

    def _problems(self) -> Iterable[base_config.Problem]:
        yield from super()._problems()
        width, inner = self.decoder.hidden_size, self.network_width
        vocab_size = self.draft_vocab_size or self.decoder.vocab_size
        if inner % self.lilicorr_num_heads:
            message = f"{self.lilicorr_num_heads} does not divide the network's width {inner}"
            yield ("lilicorr_num_heads",), message
        if self.lilicorr_candidate_topk > vocab_size:
            message = f"{self.lilicorr_candidate_topk} exceeds the vocabulary of {vocab_size}"
            yield ("lilicorr_candidate_topk",), message
        if bool(self.conv_kernel_size) != bool(self.conv_group_size):
            message = f"{self.conv_group_size}, but conv_kernel_size is {self.conv_kernel_size}"
            yield ("conv_group_size",), message
        elif self.conv_group_size and width % self.conv_group_size:
            message = f"{self.conv_group_size} does not divide the hidden size {width}"
            yield ("conv_group_size",), message
