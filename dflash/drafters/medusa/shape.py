"""The shape of Medusa heads: as their config.json states it, or as a config asks for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash.checkpoints import hf_config
from dflash.config.schema import MAX_BLOCK_SIZE, MedusaArchitecture, TargetArchitecture, option
from dflash.drafters.parts import compatibility


@dataclasses.dataclass(frozen=True)
class MedusaShape:
    """Everything that a checkpoint's config.json states.

    Attributes:
      block_size: the anchor and a token of each head.
      hidden_size: D of the target.
      vocab_size: of the target.
      num_target_layers: depth of the target that the heads were trained for.
      rms_norm_eps: of the norm in front of the heads.
    """

    block_size: int = option(minimum=2, maximum=MAX_BLOCK_SIZE)
    hidden_size: int = option(minimum=1, maximum=2**20)
    vocab_size: int = option(minimum=1, maximum=2**24)
    num_target_layers: int = option(minimum=1, maximum=2**12)
    rms_norm_eps: float = option(minimum=0.0)


def read(hf: Mapping[str, Any]) -> MedusaShape:
    """Reads a drafter's config.json.

    Raises:
      CheckpointError: a field is missing or unusable.
    """
    return hf_config.read_fields(hf, MedusaShape)


def write(shape: MedusaShape) -> dict[str, Any]:
    """The fields of config.json that state this shape; `read` reads them back."""
    return dataclasses.asdict(shape) | {"model_type": "medusa"}


def for_target(target: TargetArchitecture, options: MedusaArchitecture | None) -> MedusaShape:
    """The shape of fresh heads for a target."""
    options = options or MedusaArchitecture()
    return MedusaShape(
        block_size=options.block_size,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_hidden_layers,
        rms_norm_eps=options.rms_norm_eps,
    )


def fit(shape: MedusaShape, target: TargetArchitecture) -> MedusaShape:
    """The shape as it is.

    Raises:
      CheckpointError: the heads were trained for a target of another shape.
    """
    compatibility.check_same(
        {
            "hidden size": (shape.hidden_size, target.hidden_size),
            "number of target layers": (shape.num_target_layers, target.num_hidden_layers),
            "vocabulary": (shape.vocab_size, target.vocab_size),
        }
    )
    return shape
