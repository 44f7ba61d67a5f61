"""Config keys and shape of LiLiCorr drafters, which add a network over likely tokens to DFlash."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from dflash.checkpoints import hf_config
from dflash.config.schema import MAX_BLOCK_SIZE, TargetArchitecture, option
from dflash.drafters import base_config
from dflash.drafters.base_config import (
    MAX_LAYERS,
    MAX_RANK,
    MAX_WIDTH,
    BlockDrafterConfig,
    ConditionalTree,
)
from dflash.drafters.dflash2_config import convolution_problems
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape
from dflash.drafters.layouts_config import GROUP

_WIDEST = 1024  # Width of the published networks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateNetwork:
    """Sizes of the network over candidates, which LiLiCorr adds to DFlash.

    Attributes:
      lilicorr_candidate_topk: Number of candidates per draft position, k.
      lilicorr_hidden_size: Width of the network. 0: that of the drafter; None for a fresh drafter:
        that of the drafter, at most 1024.
      lilicorr_num_layers: Number of layers of the network.
      lilicorr_num_heads: Number of attention heads of the network.
      lilicorr_mlp_ratio: Width of the network's MLPs over its own.
      lilicorr_factor_dim: Size of the vectors that a transition is scored by; None for a fresh
        drafter: the width of the network.
      lilicorr_vector_eps: Smallest length that these vectors are divided by.
      lilicorr_logit_scale: Factor from the cosine of two vectors to a logit.
      conv_kernel_size: Number of taps of DFlash2's convolutions; 0 for none.
      conv_group_size: Number of channels that share a correction of the taps; 0 for none.
    """

    lilicorr_candidate_topk: int = option(8, minimum=1, maximum=1024)
    lilicorr_hidden_size: int | None = option(None, minimum=0, maximum=MAX_WIDTH)
    lilicorr_num_layers: int = option(2, minimum=1, maximum=MAX_LAYERS)
    lilicorr_num_heads: int = option(8, minimum=1, maximum=2**16)
    lilicorr_mlp_ratio: float = option(2.0, minimum=0.01, maximum=64.0)
    lilicorr_factor_dim: int | None = option(None, minimum=1, maximum=MAX_RANK)
    lilicorr_vector_eps: float = option(1e-4, minimum=1e-12, maximum=0.5)
    lilicorr_logit_scale: float = option(8.0, minimum=1e-3, maximum=1e4)
    conv_kernel_size: int = option(0, minimum=0, maximum=MAX_BLOCK_SIZE)
    conv_group_size: int = option(0, minimum=0, maximum=MAX_WIDTH)


@dataclasses.dataclass(frozen=True)
class LiLiCorrArchitecture(CandidateNetwork, DFlashArchitecture):
    """Architecture of a fresh LiLiCorr drafter."""

    def shape_fields(self, target: TargetArchitecture) -> dict[str, Any]:
        """Returns the fields of `LiLiCorrShape`; see `DFlashArchitecture.shape_fields`."""
        width = self.lilicorr_hidden_size or min(target.hidden_size, _WIDEST)
        return super().shape_fields(target) | {
            "lilicorr_hidden_size": width,
            "lilicorr_factor_dim": self.lilicorr_factor_dim or width,
        }


@dataclasses.dataclass(frozen=True)
class LiLiCorrConfig(BlockDrafterConfig):
    """Keys of a LiLiCorr drafter."""

    name: str = "lilicorr"
    tree: ConditionalTree | None = None  # None: a chain.
    architecture: LiLiCorrArchitecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiLiCorrShape(CandidateNetwork, DFlashShape):
    """Contents of a LiLiCorr checkpoint's config.json."""

    layout: ClassVar[Mapping[str, Any]] = {"projector": "lilicorr"}
    anchor_may_draft: ClassVar[bool] = False
    architecture: ClassVar[type] = LiLiCorrArchitecture
    # Files without convolutions leave these fields out.
    file_defaults: ClassVar[Mapping[str, Any]] = {"conv_kernel_size": 0, "conv_group_size": 0}

    @property
    def network_width(self) -> int:
        """Width of the network over candidates."""
        return self.lilicorr_hidden_size or self.decoder.hidden_size

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        hf_config.check_only(config, "has_own_lm_head", False)
        hf_config.check_only(config[GROUP], "lilicorr_enabled", True)
        return super()._read(config)

    def to_hf(self) -> dict[str, Any]:
        config, added = super().to_hf(), self.added
        if not self.conv_kernel_size:
            added = {name: added[name] for name in added if name not in self.file_defaults}
        config[GROUP] |= {"projector_type": "lilicorr", "lilicorr_enabled": True} | added
        return config

    def _problems(self) -> Iterable[base_config.Problem]:
        yield from super()._problems()
        inner = self.network_width
        if inner % self.lilicorr_num_heads:
            message = f"{self.lilicorr_num_heads} does not divide the network's width {inner}"
            yield ("lilicorr_num_heads",), message
        topk, vocab_size = self.lilicorr_candidate_topk, self.num_draft_tokens
        if topk > vocab_size:
            message = f"{topk} exceeds the vocabulary of {vocab_size}"
            yield ("lilicorr_candidate_topk",), message
        yield from convolution_problems(self)
