"""Overrides of a config that select a target or a drafter by a short reference."""

import os

from dflash import errors
from dflash.config import registry
from dflash.loading import models


def overrides(
    target: str | os.PathLike | None, drafter: str | os.PathLike | None
) -> tuple[str, ...]:
    """Returns the overrides that select a target and a drafter.

    Args:
      target: Reference of a checkpoint; None for none.
      drafter: Name of a strategy, or reference of a checkpoint; None for none.
    Raises:
      CheckpointError: The drafter's checkpoint cannot be read.
    """
    target_overrides = () if target is None else (f"target.checkpoint={os.fspath(target)}",)
    return *target_overrides, *_drafter_overrides(drafter)


def _drafter_overrides(drafter: str | os.PathLike | None) -> tuple[str, ...]:
    if drafter is None:
        return ()
    reference = os.fspath(drafter)
    if reference in registry.DRAFTERS:
        return (f"drafter.name={reference}",)
    try:
        name = models.find_strategy(reference)
    except errors.CheckpointError as error:
        near = registry.suggest(reference, registry.DRAFTERS, exhaustive=False)
        raise errors.CheckpointError(f"drafter: {error}{near}") from error
    return f"drafter.name={name}", f"drafter.checkpoint={reference}"
