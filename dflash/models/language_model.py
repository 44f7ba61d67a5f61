"""Language models of checkpoints that hold vision or audio towers, too."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.checkpoints.tensor_map import Source, renamed
from dflash.config.schema import TargetArchitecture

_TEXT = "text_config"


class LanguageModel:
    """Mixin that reads a family's tensors and fields from within a multimodal checkpoint.

    It precedes the family of the language model among the base classes. The other models are not
    read: prompts are text.
    """

    text_class: ClassVar[type]  # The family of the language model alone.
    tower_names: ClassVar[tuple[str, ...]]  # Names of the other models' tensors, with wildcards.
    # Beginning of the names of the language model's tensors, but the head's.
    text_prefix: ClassVar[str] = "model.language_model."
    # Fields of the language model that files have beside its part of config.json.
    outer_fields: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Returns the names of the towers' tensors, and those that the family ignores."""
        return (*super().ignored_checkpoint_names, *self.tower_names)

    @property
    def checkpoint_copies(self) -> dict[str, str]:
        """Returns the copies of the family, by the names of these files."""
        copies = super().checkpoint_copies.items()
        return {self._within(copy): self._within(name) for copy, name in copies}

    def checkpoint_name(self, path: str) -> Source:
        """Returns the source of a parameter: the family's, within the language model."""
        return renamed(super().checkpoint_name(path), self._within)

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> TargetArchitecture:
        """Reads the language model's part of config.json; see `Decoder`."""
        text = hf_config.read_group(config, _TEXT)
        if not text:
            raise errors.CheckpointError(f"{hf_config.FILE}: missing {_TEXT}")
        outer = {"model_type": cls.text_class.hf_model_type}
        outer |= {name: config[name] for name in cls.outer_fields if name in config}
        return super().architecture_from_hf({**outer, **text})

    @classmethod
    def config_to_hf(cls, arch: TargetArchitecture) -> dict[str, Any]:
        """Returns the config.json of a checkpoint with this architecture, without towers."""
        outer = super().config_to_hf(arch)
        names = ("architectures", "model_type", "eos_token_id", *cls.outer_fields)
        return {name: outer[name] for name in names} | {_TEXT: cls.text_class.config_to_hf(arch)}

    def _within(self, name: str) -> str:
        return name.replace("model.", self.text_prefix, 1)
