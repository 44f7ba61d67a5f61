"""The shape of a DSpark drafter: DFlash's, with a previous-token head and a confidence head."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash.checkpoints import hf_config
from dflash.config.schema import MAX_RANK, DSparkArchitecture, TargetArchitecture, option
from dflash.drafters.dflash import shape as dflash_shape
from dflash.drafters.dflash.shape import DFlashShape, fit

__all__ = ["DSparkShape", "fit", "for_target", "read", "write"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Own:
    """Fields of a DSpark drafter beside DFlash's.

    Attributes:
      markov_rank: numbers that represent a token to the draft position after it.
      markov_head_type: kind of the previous-token head.
      enable_confidence_head: whether there is one.
      confidence_head_with_markov: whether it reads the token before the draft position.
    """

    markov_rank: int = option(minimum=1, maximum=MAX_RANK)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = option()
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkShape(DFlashShape, _Own):
    """Everything that a DSpark checkpoint's config.json states; block_size counts drafts."""


@dataclasses.dataclass(frozen=True)
class _Taps:
    target_layer_ids: tuple[int, ...] = option(minimum=0, maximum=2**12)


def read(hf: Mapping[str, Any]) -> DSparkShape:
    """Reads a drafter's config.json, which has DFlash's fields without a group of their own.

    Raises:
      CheckpointError: a field is missing, unusable, or contradicts another.
    """
    hf_config.check_only(hf, "draft_vocab_size", hf.get("vocab_size"))
    own = hf_config.read_fields(hf, _Own)
    taps = hf_config.read_fields(hf, _Taps).target_layer_ids
    base = dflash_shape.read({**hf, "dflash_config": {"target_layer_ids": list(taps)}})
    return DSparkShape(**vars(base), **vars(own))


def write(shape: DSparkShape) -> dict[str, Any]:
    """The fields of config.json that state this shape; `read` reads them back."""
    config = dflash_shape.write(shape)
    group = config.pop("dflash_config")
    own = {field.name: getattr(shape, field.name) for field in dataclasses.fields(_Own)}
    return config | {name: group[name] for name in ("mask_token_id", "target_layer_ids")} | own


def for_target(target: TargetArchitecture, options: DSparkArchitecture | None) -> DSparkShape:
    """The shape of a fresh drafter for a target.

    Raises:
      ConfigError: the options contradict one another.
    """
    options = options or DSparkArchitecture()
    return DSparkShape(
        **vars(dflash_shape.of_blocks(target, options)),
        markov_rank=options.markov_rank,
        markov_head_type=options.markov_head_type,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
