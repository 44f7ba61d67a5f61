"""Consistency checks between a drafter's keys and the way that it decodes; see `checks`."""

from collections.abc import Callable, Iterator
from typing import Any

from dflash.config import registry, schema

Problem = tuple[tuple[str, ...], str]
Check = Callable[[Any], Iterator[Problem]]  # Of a config.


def _draft_model(config: Any) -> Iterator[Problem]:
    """Checks the family of a drafter that is a language model."""
    family = getattr(config.drafter, "family", None)
    if family is not None and family not in registry.TARGETS:
        near = registry.suggest(family, registry.TARGETS)
        yield ("drafter.family",), f"unknown name {family!r}{near}"


def _fixed(config: Any) -> Iterator[Problem]:
    """Checks that training and compile reports choose nothing that only decoding can choose."""
    for key, groups in (("block_size", ("train", "tpu")), ("window", ("train",))):
        elsewhere = any(hasattr(config, group) for group in groups)
        if elsewhere and getattr(config.drafter, key, None) == schema.AUTO:
            yield (f"drafter.{key}",), "auto is for decoding only; give a number, or leave it out"


def _longest_context(config: Any) -> Iterator[Problem]:
    """Checks that cycles without drafts are among the choices."""
    drafter = config.drafter
    if getattr(drafter, "longest_context", None) is not None and not drafter.adaptive:
        keys = "drafter.longest_context", "drafter.block_size"
        yield keys, "needs drafter.block_size=auto, which can decode plainly"


def _divide_rows(config: Any) -> Iterator[Problem]:
    """Checks that divide_rows=false applies to rows that could be divided."""
    if not (config.drafter.divides_rows or config.drafter.adaptive):
        keys = "drafter.divide_rows", "drafter.block_size"
        yield keys, "false has a meaning with drafter.block_size=auto only; leave it out"


def _block_verification(config: Any) -> Iterator[Problem]:
    """Checks that drafts which are verified as a block form a chain."""
    if config.decode.verify == "block" and getattr(config.drafter, "tree", None) is not None:
        keys = "decode.verify", "drafter.tree"
        yield keys, "block is a rule for chains; leave drafter.tree out, or use rejection"


def _lookup(config: Any) -> Iterator[Problem]:
    """Checks that drafts which copies may replace form a chain."""
    if config.decode.lookup and getattr(config.drafter, "tree", None) is not None:
        keys = "decode.lookup", "drafter.tree"
        yield keys, "copies replace chains, not trees; leave one of the two out"


def _overlap(config: Any) -> Iterator[Problem]:
    """Checks that a drafter on devices of its own decodes, and drafts what overlap supports."""
    drafter = config.drafter
    if not drafter.overlaps:
        if getattr(drafter, "devices", 1) > 1:
            keys = "drafter.devices", "drafter.overlap"
            yield keys, "needs drafter.overlap=ssd; leave it out"
        return
    if any(hasattr(config, group) for group in ("train", "answers", "tpu")):
        yield ("drafter.overlap",), "is for decoding and serving only; leave it out"
        return
    kind = f"drafter.overlap={drafter.overlap}"
    for key in ("block_size", "window"):
        if getattr(drafter, key, None) == schema.AUTO:
            keys = f"drafter.{key}", "drafter.overlap"
            yield keys, f"auto is not supported with {kind}; give a number, or leave it out"
    if getattr(drafter, "tree", None) is not None:
        keys = "drafter.tree", "drafter.overlap"
        yield keys, f"{kind} drafts chains; leave one of the two out"
    if config.decode.verify != "coupled":
        keys = "decode.verify", "drafter.overlap"
        yield keys, f"{config.decode.verify} is not supported with {kind}; use coupled"
    if config.decode.lookup:
        keys = "decode.lookup", "drafter.overlap"
        yield keys, f"is not supported with {kind}; leave one of the two out"


# Groups that a config must have, and their check.
CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("drafter",), _draft_model),
    (("drafter",), _fixed),
    (("drafter", "decode"), _longest_context),
    (("drafter", "decode"), _divide_rows),
    (("drafter", "decode"), _block_verification),
    (("drafter", "decode"), _lookup),
    (("drafter",), _overlap),
)
