"""Engines over the models of a run, by the way that drafting overlaps verification."""

from dflash import errors
from dflash.config.schema import DecodeRun
from dflash.drafters.base import Drafter
from dflash.inference.engine import Engine
from dflash.inference.overlap.engine import OverlappedEngine
from dflash.inference.overlap.overlap import Overlap
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
    return sharding.beside(target.sharding, config.mesh.drafter or 1)


def make_engine(
    config: DecodeRun,
    target: Decoder,
    drafter: Drafter,
    *,
    max_length: int,
    num_stop_ids: int,
    there: Sharding | None = None,
) -> Engine:
    """Returns an engine over two models, which may be abstract.

    Args:
      config: Config of the run.
      target: Target model.
      drafter: Drafter.
      max_length: Length of the longest sequence in tokens, prompt and output together.
      num_stop_ids: Number of stop ids that a request may have.
      there: Placement of a drafter that overlaps; None is `drafter_sharding`.
    """
    sizes = {"max_length": max_length, "num_stop_ids": num_stop_ids}
    overlap = Overlap.of(config.drafter)
    if overlap is None:
        return Engine(
            target,
            drafter,
            config.decode,
            adaptive_blocks=config.drafter.adaptive,
            divide_rows=config.drafter.divides_rows,
            **sizes,
        )
    there = there or drafter_sharding(config, target)
    return OverlappedEngine(
        target, drafter, config.decode, overlap=overlap, drafter_sharding=there, **sizes
    )


def longest_path(config: DecodeRun, drafter: Drafter) -> int:
    """Returns the most tokens that a cycle can commit."""
    overlap = Overlap.of(config.drafter)
    fewer = 0 if overlap is None else drafter.num_draft_tokens - overlap.num_verified(drafter)
    return drafter.longest_path - fewer


def check_drafter(config: DecodeRun, target: Decoder, drafter: Drafter) -> None:
    """Raises ConfigError if a drafter does not draft what the run's way of decoding needs."""
    _check_rule(config, drafter)
    if config.decode.lookup and drafter.drafts_trees:
        raise errors.ConfigError(
            f"decode.lookup: copies replace chains, and drafter.name={config.drafter.name} drafts "
            "trees; leave decode.lookup out"
        )
    overlap = Overlap.of(config.drafter)
    if overlap is not None and overlap.fan_out:
        _check_speculation(overlap, target, drafter)


def _check_rule(config: DecodeRun, drafter: Drafter) -> None:
    """Raises ConfigError if verification needs probabilities that the drafter does not provide."""
    drafts = drafter.num_draft_tokens > 0
    rule = config.decode.verify
    if rule != "coupled" and drafts and not drafter.has_probs:
        raise errors.ConfigError(
            f"decode.verify: {rule} weighs drafts by their probabilities, and drafter.name="
            f"{config.drafter.name} has none; use decode.verify=coupled"
        )


def _check_speculation(overlap: Overlap, target: Decoder, drafter: Drafter) -> None:
    """Raises ConfigError if a drafter cannot draft for the outcomes of a verification."""
    if drafter.num_draft_tokens < 2:
        raise errors.ConfigError(
            "drafter.overlap: ssd verifies all drafts but the last, and there is only one; draft "
            "more, or leave it out"
        )
    if overlap.fan_out >= target.arch.vocab_size:
        raise errors.ConfigError(
            f"drafter.fan_out: {overlap.fan_out} is not below the target's vocabulary of "
            f"{target.arch.vocab_size}; lower it"
        )


def notes(config: DecodeRun) -> list[str]:
    """Returns lines on settings that have no effect on overlapped decoding."""
    kind, decode = f"drafter.overlap={getattr(config.drafter, 'overlap', None)}", config.decode
    lines = []
    if config.drafter.overlaps and decode.prefix_cache:
        lines.append(f"decode.prefix_cache: off, because {kind} does not support it")
    if config.drafter.overlaps and decode.partial_dispatches:
        lines.append(f"decode.partial_dispatches: off, because {kind} computes all slots")
    return lines
