"""Rollouts of reinforcement learning with a drafter, for the trainers of Tunix and MaxText.

`DFlashRollout` is a rollout engine of Tunix's `ClusterConfig`; see docs/rl.md. Nothing is imported
before it is used, since it needs google-tunix.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.rl.rollout import DFlashRollout

__all__ = ["DFlashRollout"]


def __getattr__(name: str) -> Any:
    if name == "DFlashRollout":
        from dflash.rl.rollout import DFlashRollout

        return DFlashRollout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
