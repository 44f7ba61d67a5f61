"""Kimi K2.5: the text model of a multimodal checkpoint, with the architecture of Kimi K2."""

from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.checkpoints.tensor_map import Source, renamed
from dflash.models.deepseek_v3 import DeepseekV3
from dflash.models.deepseek_v3_config import DeepseekV3Architecture

_TEXT = "text_config"
_PREFIX = "language_model."


class KimiK25(DeepseekV3):
    """Language model of `KimiK25ForConditionalGeneration`; its vision tower is not read."""

    hf_architectures = ("KimiK25ForConditionalGeneration",)
    hf_model_type = "kimi_k25"

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        return (*super().ignored_checkpoint_names, "vision_tower.*", "mm_projector.*")

    @property
    def checkpoint_copies(self) -> dict[str, str]:
        copies = super().checkpoint_copies.items()
        return {_PREFIX + copy: _PREFIX + original for copy, original in copies}

    def checkpoint_name(self, path: str) -> Source:
        return renamed(super().checkpoint_name(path), lambda name: _PREFIX + name)

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> DeepseekV3Architecture:
        text = hf_config.read_group(config, _TEXT)
        if not text:
            raise errors.CheckpointError(f"{hf_config.FILE}: missing {_TEXT}")
        return super().architecture_from_hf(text)

    @classmethod
    def config_to_hf(cls, arch: DeepseekV3Architecture) -> dict[str, Any]:
        text = super().config_to_hf(arch) | {
            "architectures": ["KimiK2ForCausalLM"],
            "model_type": "kimi_k2",
        }
        ends = {key: text[key] for key in ("eos_token_id", "tie_word_embeddings")}
        names = {"architectures": [cls.hf_architectures[0]], "model_type": cls.hf_model_type}
        return names | ends | {_TEXT: text}
