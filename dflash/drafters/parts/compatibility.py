"""Whether a drafter's checkpoint belongs to the target that it is given to."""

from collections.abc import Mapping

from dflash import errors


def check_same(pairs: Mapping[str, tuple[int, int]]) -> None:
    """Compares what a drafter was made for with the target.

    Args:
      pairs: by the name of each size, the drafter's and the target's.
    Raises:
      CheckpointError: some differ; the message names them all.
    """
    differences = [
        f"{name} {drafters} (target: {targets})"
        for name, (drafters, targets) in pairs.items()
        if drafters != targets
    ]
    if differences:
        raise errors.CheckpointError(
            f"drafter.checkpoint: trained for another target: {', '.join(differences)}"
        )
