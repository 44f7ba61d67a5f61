"""Checkpoints of the whole training state: written in the background, whole or not at all.

Orbax writes and commits; on top of it every array carries a checksum of its bits, because a flipped
bit in compressed data may otherwise be restored without a word.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers

from dflash import errors
from dflash.training import state as states
from dflash.training.state import TrainState

DAMAGED = "damaged"  # where checkpoints go that cannot be restored

_STATE, _FACTS = "state", "facts"
_REASON = re.compile(
    r"No space left on device|File too large|Disk quota exceeded|Permission denied|"
    r"Read-only file system|Input/output error"
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was found good.

    Attributes:
      step: its number.
      state: the arrays, each in its place.
      facts: what was saved beside them.
    """

    step: int
    state: TrainState
    facts: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run: the last few, and the best."""

    def __init__(self, directory: pathlib.Path, *, keep_last: int):
        """Opens or makes the directory; what a kill left half-written there is removed."""
        self._directory = directory.absolute()
        self._in_flight: int | None = None
        self._good: int | None = None
        policies = checkpoint_managers
        keep = policies.AnyPreservationPolicy(
            [
                policies.LatestN(keep_last),
                policies.BestN(
                    get_metric_fn=_score,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self._verbosity = logging.get_verbosity()
        self._hook = sys.unraisablehook
        # Orbax's own account of what went wrong would bury our one line.
        logging.set_verbosity(logging.FATAL)
        sys.unraisablehook = self._unraisable
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keep,
            best_fn=_score,  # the policy overrides it, but without it scores are not kept
            cleanup_tmp_directories=True,
        )
        with self._explained("opened"):
            self._manager = ocp.CheckpointManager(self._directory, options=options)
            self._good = self._manager.latest_step()

    def steps(self) -> list[int]:
        """Numbers of the checkpoints that are there, in order."""
        return sorted(self._manager.all_steps())

    @property
    def good_step(self) -> int | None:
        """Number of the newest checkpoint that is known to be whole; None if there is none."""
        return self._good

    def save(
        self, step: int, state: TrainState, facts: Mapping[str, Any], *, score: float | None
    ) -> None:
        """Copies the state and writes it in the background; waits for the save before, if any.

        Args:
          step: steps done.
          state: may be donated as soon as this returns.
          facts: further content, as JSON has it.
          score: of an evaluation at this step, more is better; None if there was none.
        Raises:
          CheckpointError: this or an earlier save cannot be written.
        """
        self.wait()
        arrays = states.flatten(state)
        sums = {name: int(x) for name, x in jax.device_get(states.checksums(arrays)).items()}
        scored = score is not None and math.isfinite(score)
        self._in_flight = step
        with self._explained("written"):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        _STATE: ocp.args.PyTreeSave(arrays),
                        _FACTS: ocp.args.JsonSave({**facts, "checksums": sums}),
                    }
                ),
                metrics={"score": score} if scored else None,
            )

    def poll(self) -> None:
        """Raises CheckpointError if the save in the background has failed."""
        if self._in_flight is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until what was saved is safe.

        Raises:
          CheckpointError: it cannot be written.
        """
        if self._in_flight is None:
            return
        with self._explained("written"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self._good, self._in_flight = self._in_flight, None

    def restore(self, like: TrainState, tell: Callable[[str], None]) -> Restored | None:
        """Restores the newest checkpoint that is good, and sets damaged ones aside.

        Args:
          like: abstract; the arrays go where it says.
          tell: takes one line about each damaged checkpoint.
        Returns:
          The checkpoint; None if there is none at all.
        Raises:
          CheckpointError: there are some, and all are damaged.
        """
        found = self.steps()
        for step in reversed(found):
            try:
                restored = self._restore(step, like)
            except Exception as error:  # whatever the damage leads to
                earlier = [other for other in found if other < step]
                what_next = (
                    f"going back to step {earlier[-1]}" if earlier else "it was the only one"
                )
                tell(f"checkpoint of step {step} is damaged ({_reason(error)}): {what_next}")
                self._set_aside(step)
                continue
            self._good = step
            return restored
        if found:
            raise errors.CheckpointError(
                f"{self._directory}: no good checkpoint is left; the damaged ones are in "
                f"{self._directory.parent / DAMAGED}; start again in another --workdir"
            )
        return None

    def close(self) -> None:
        """Lets go of the directory; what is still being written is finished, or given up."""
        try:
            with contextlib.suppress(Exception):
                self._manager.close()
        finally:
            logging.set_verbosity(self._verbosity)
            sys.unraisablehook = self._hook

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _unraisable(self, unraisable) -> None:
        """Leaves out what tensorstore's threads say after Orbax has given up on a read."""
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)

    def _restore(self, step: int, like: TrainState) -> Restored:
        arrays = states.flatten(like)
        restore = ocp.args.PyTreeRestore(
            arrays, restore_args=ocp.checkpoint_utils.construct_restore_args(arrays)
        )
        content = self._manager.restore(
            step, args=ocp.args.Composite(**{_STATE: restore, _FACTS: ocp.args.JsonRestore()})
        )
        facts = dict(content[_FACTS])
        wanted = facts.pop("checksums")
        sums = jax.device_get(states.checksums(content[_STATE]))
        wrong = [name for name in arrays if int(sums[name]) != wanted[name]]
        if wrong:
            raise ValueError(f"the checksum of {wrong[0]} is wrong")
        return Restored(step, states.unflatten(like, content[_STATE]), facts)

    def _set_aside(self, step: int) -> None:
        """Moves a checkpoint out of the way: its step will be saved again."""
        if jax.process_index() == 0:
            aside = self._directory.parent / DAMAGED / str(step)
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            shutil.move(self._directory / str(step), aside)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"checkpoint {step} set aside")
        self._manager.reload()

    @contextlib.contextmanager
    def _explained(self, what: str):
        """Turns whatever goes wrong into one line that says what is left."""
        try:
            yield
        except Exception as error:  # of Orbax, tensorstore and the system, wrapped in each other
            which = "" if self._in_flight is None else f" of step {self._in_flight}"
            left = "there is none before it"
            if self._good is not None:
                left = f"the last good one, of step {self._good}, is kept"
            self._in_flight = None
            raise errors.CheckpointError(
                f"{self._directory}: checkpoint{which} cannot be {what}: {_reason(error)}; {left}"
            ) from error


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["score"]


def _reason(error: BaseException) -> str:
    """A few words of what may be pages."""
    text = " ".join(str(error).split())
    known = _REASON.search(text)
    if known:
        return known.group()
    return text if len(text) <= 120 else f"{text[:120]}…"
