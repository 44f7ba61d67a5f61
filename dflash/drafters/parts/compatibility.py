"""Whether a drafter's shape is sound, and belongs to the target that it is given to."""

from collections.abc import Iterable, Mapping

from dflash import errors
from dflash.checkpoints import hf_config

# The fields involved, the one to blame first, and what is wrong; as in config/checks.py.
Problem = tuple[tuple[str, ...], str]


def check_file(problems: Iterable[Problem]) -> None:
    """Raises CheckpointError for problems of a shape that a checkpoint's config.json states."""
    lines = [f"{hf_config.FILE}: {fields[0]}: {message}" for fields, message in problems]
    if lines:
        raise errors.CheckpointError("\n".join(lines))


def check_options(problems: Iterable[Problem]) -> None:
    """Raises ConfigError for problems of a shape that the run's config asks for."""
    lines = [f"drafter.architecture.{fields[0]}: {message}" for fields, message in problems]
    if lines:
        raise errors.ConfigError(*lines)


def check_same(pairs: Mapping[str, tuple[int | None, int]]) -> None:
    """Compares what a drafter was made for with the target.

    Args:
      pairs: by the name of each size, the drafter's (None where not stated) and the target's.
    Raises:
      CheckpointError: some differ; the message names them all.
    """
    differences = [
        f"{name} {drafters} (target: {targets})"
        for name, (drafters, targets) in pairs.items()
        if drafters not in (None, targets)
    ]
    if differences:
        raise errors.CheckpointError(
            f"drafter.checkpoint: trained for another target: {', '.join(differences)}"
        )
