"""Engines over the models of a run, by the way that drafting overlaps verification."""

from dflash import errors
from dflash.config.schema import DecodeConfig, DrafterConfig
from dflash.drafters.base import Drafter
from dflash.inference.engine import Engine
from dflash.inference.overlap.engine import OverlappedEngine
from dflash.models.decoder import Decoder
from dflash.parallel import sharding
from dflash.parallel.sharding import Sharding


def drafter_sharding(config: DrafterConfig, target: Decoder) -> Sharding:
    """Returns the placement of the drafter: on the target's devices, or on devices of its own.

    Raises:
      ConfigError: Too few devices are left, or the run has several processes.
    """
    if not config.overlaps:
        return target.sharding
    return sharding.beside(target.sharding, config.devices)


def make_engine(
    decode: DecodeConfig,
    drafting: DrafterConfig,
    target: Decoder,
    drafter: Drafter,
    *,
    max_length: int,
    num_stop_ids: int,
) -> Engine | OverlappedEngine:
    """Returns an engine over two models, which may be abstract.

    Args:
      max_length: Length of the longest sequence in tokens, prompt and output together.
      num_stop_ids: Number of stop ids that a request may have.
    """
    sizes = {"max_length": max_length, "num_stop_ids": num_stop_ids}
    if drafting.overlaps:
        return OverlappedEngine(
            target,
            drafter,
            decode,
            fan_out=drafting.fan_out,
            drafter_sharding=drafter_sharding(drafting, target),
            **sizes,
        )
    return Engine(
        target,
        drafter,
        decode,
        adaptive_blocks=drafting.adaptive,
        divide_rows=drafting.divides_rows,
        **sizes,
    )


def check_drafter(
    decode: DecodeConfig, drafting: DrafterConfig, target: Decoder, drafter: Drafter
) -> None:
    """Raises ConfigError if a drafter does not draft what the run's way of decoding needs."""
    if decode.verify != "coupled" and drafter.num_draft_tokens and not drafter.has_probs:
        raise errors.ConfigError(
            f"decode.verify: {decode.verify} weighs drafts by their probabilities, and "
            f"drafter.name={drafting.name} has none; use decode.verify=coupled"
        )
    if decode.lookup and drafter.drafts_trees:
        raise errors.ConfigError(
            f"decode.lookup: copies replace chains, and drafter.name={drafting.name} drafts "
            "trees; leave decode.lookup out"
        )
    if drafting.overlaps:
        _check_speculation(drafting.fan_out, target, drafter)


def _check_speculation(fan_out: int, target: Decoder, drafter: Drafter) -> None:
    """Raises ConfigError if a drafter cannot draft for the outcomes of a verification."""
    if drafter.num_draft_tokens < 2:
        raise errors.ConfigError(
            "drafter.overlap: ssd verifies all drafts but the last, and there is only one; draft "
            "more, or leave it out"
        )
    if fan_out >= target.arch.vocab_size:
        raise errors.ConfigError(
            f"drafter.fan_out: {fan_out} is not below the target's vocabulary of "
            f"{target.arch.vocab_size}; lower it"
        )


def notes(decode: DecodeConfig) -> list[str]:
    """Returns lines on settings that have no effect on overlapped decoding."""
    keys = {
        "prefix_cache": "drafter.overlap=ssd does not support it",
        "partial_dispatches": "drafter.overlap=ssd computes all slots",
    }
    return [
        f"decode.{key}: off, because {why}" for key, why in keys.items() if getattr(decode, key)
    ]
