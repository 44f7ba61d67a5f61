"""Engines over the models of a run, by the way that drafting overlaps verification."""

from dflash import errors
from dflash.config.schema import DecodeRun
from dflash.drafters.base import Drafter
from dflash.inference.engine import Engine
from dflash.inference.overlap.engine import OverlappedEngine
from dflash.models.decoder import Decoder
from dflash.parallel import sharding
from dflash.parallel.sharding import Sharding


def drafter_sharding(config: DecodeRun, target: Decoder) -> Sharding:
    """Returns the placement of the drafter: on the target's devices, or on devices of its own.

    Raises:
      ConfigError: Too few devices are left, or the run has several processes.
    """
    if not config.drafter.overlaps:
        return target.sharding
    return sharding.beside(target.sharding, config.drafter.devices)


def make_engine(
    config: DecodeRun,
    target: Decoder,
    drafter: Drafter,
    *,
    max_length: int,
    num_stop_ids: int,
) -> Engine | OverlappedEngine:
    """Returns an engine over two models, which may be abstract.

    Args:
      config: Config of the run.
      target: Target model.
      drafter: Drafter.
      max_length: Length of the longest sequence in tokens, prompt and output together.
      num_stop_ids: Number of stop ids that a request may have.
    """
    sizes = {"max_length": max_length, "num_stop_ids": num_stop_ids}
    if config.drafter.overlaps:
        return OverlappedEngine(
            target,
            drafter,
            config.decode,
            fan_out=config.drafter.fan_out,
            drafter_sharding=drafter_sharding(config, target),
            **sizes,
        )
    return Engine(
        target,
        drafter,
        config.decode,
        adaptive_blocks=config.drafter.adaptive,
        divide_rows=config.drafter.divides_rows,
        **sizes,
    )


def longest_path(config: DecodeRun, drafter: Drafter) -> int:
    """Returns the most tokens that a cycle can commit."""
    return drafter.longest_path - config.drafter.overlaps


def check_drafter(config: DecodeRun, target: Decoder, drafter: Drafter) -> None:
    """Raises ConfigError if a drafter does not draft what the run's way of decoding needs."""
    _check_rule(config, drafter)
    if config.decode.lookup and drafter.drafts_trees:
        raise errors.ConfigError(
            f"decode.lookup: copies replace chains, and drafter.name={config.drafter.name} drafts "
            "trees; leave decode.lookup out"
        )
    if config.drafter.overlaps:
        _check_speculation(config.drafter.fan_out, target, drafter)


def _check_rule(config: DecodeRun, drafter: Drafter) -> None:
    """Raises ConfigError if verification needs probabilities that the drafter does not provide."""
    drafts = drafter.num_draft_tokens > 0
    rule = config.decode.verify
    if rule != "coupled" and drafts and not drafter.has_probs:
        raise errors.ConfigError(
            f"decode.verify: {rule} weighs drafts by their probabilities, and drafter.name="
            f"{config.drafter.name} has none; use decode.verify=coupled"
        )


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


def notes(config: DecodeRun) -> list[str]:
    """Returns lines on settings that have no effect on overlapped decoding."""
    if not config.drafter.overlaps:
        return []
    keys = {
        "prefix_cache": "drafter.overlap=ssd does not support it",
        "partial_dispatches": "drafter.overlap=ssd computes all slots",
    }
    return [
        f"decode.{key}: off, because {why}"
        for key, why in keys.items()
        if getattr(config.decode, key)
    ]
