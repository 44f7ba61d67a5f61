"""The shape of a draft model: that of a target's checkpoint, or as a config asks for it.

Its class is found through the registry, as that of a target: this file knows no family.
"""

import dataclasses
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.config import registry
from dflash.config.schema import AutoregressiveConfig, DraftModelArchitecture, TargetArchitecture
from dflash.drafters.parts import decoder_shape
from dflash.loading import models


@dataclasses.dataclass(frozen=True)
class DraftModelShape:
    """A registered target family and its architecture.

    Attributes:
      family: class of the model.
      decoder: of that class.
    """

    family: type
    decoder: TargetArchitecture


def read(hf: Mapping[str, Any]) -> DraftModelShape:
    """Reads a checkpoint's config.json, by its family.

    Raises:
      CheckpointError: no registered family has this architecture, or a field is unusable.
    """
    _, family = models.find_class(hf, pathlib.Path(), registry.TARGETS)
    return DraftModelShape(family, family.architecture_from_hf(hf))


def for_target(
    target: TargetArchitecture,
    options: DraftModelArchitecture | None,
    family: str = AutoregressiveConfig.family,
) -> DraftModelShape:
    """The shape of a draft model without a checkpoint, of a registered family.

    Raises:
      ConfigError: the options contradict one another, there is no such family, or the options do
        not state all that its shape has.
    """
    options = options or DraftModelArchitecture()
    entry = registry.find(registry.TARGETS, family, "drafter.family")
    if not _is_dense(entry):
        dense = (name for name, entry in registry.TARGETS.items() if _is_dense(entry))
        raise errors.ConfigError(
            f"drafter.family: {family!r} has experts or attention of its own, which "
            "drafter.architecture does not state; use drafter.checkpoint, or a family of "
            f"{', '.join(dense)}"
        )
    decoder = decoder_shape.for_target(
        target,
        options,
        num_hidden_layers=options.num_hidden_layers,
        hidden_size=options.hidden_size,
        tie_word_embeddings=options.tie_word_embeddings,
    )
    return DraftModelShape(registry.load(entry.implementation), decoder)


def _is_dense(entry: registry.Entry) -> bool:
    """Whether the shape of a family's targets is that of every decoder."""
    stated = typing.get_type_hints(registry.load(entry.schema))["architecture"]
    return TargetArchitecture in typing.get_args(stated)


def fit(shape: DraftModelShape, target: TargetArchitecture) -> DraftModelShape:
    """The shape as it is.

    Raises:
      CheckpointError: the model has another vocabulary than the target.
    """
    if shape.decoder.vocab_size != target.vocab_size:
        raise errors.CheckpointError(
            f"drafter.checkpoint: another vocabulary than the target's: {shape.decoder.vocab_size} "
            f"tokens, the target has {target.vocab_size}; use a model of the target's family"
        )
    return shape
