"""Checkpoints of the whole training state: written in the background, whole or not at all.

Orbax writes and commits. Two kinds of checksums go into each checkpoint beside it: of every array's
bits, because a flipped bit in compressed data may otherwise be restored unnoticed; and of every
file, in files.json, which tell damage apart from whatever else keeps a checkpoint from being read,
such as too little memory.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.path import atomicity

from dflash import errors
from dflash.checkpoints import orbax_io
from dflash.parallel import agreement, distributed
from dflash.storage import files
from dflash.training import state as states
from dflash.training.state import TrainState

DAMAGED = "damaged"  # where checkpoints go that cannot be restored

_STATE, _METADATA = "state", "facts"
_FILE_SUMS = "files.json"
_REASON = re.compile(
    r"No space left on device|File too large|Disk quota exceeded|Permission denied|"
    r"Read-only file system|Input/output error|Too many open files|Cannot allocate memory"
)


class _ChecksumError(Exception):
    """A restored array does not have the checksum that it was saved with."""


@dataclasses.dataclass(frozen=True)
class RestoredCheckpoint:
    """A checkpoint that was found good.

    Attributes:
      step: number of steps done.
      state: arrays, each in its place.
      metadata: JSON content that was saved beside them.
    """

    step: int
    state: TrainState
    metadata: dict[str, Any]


@dataclasses.dataclass
class _LastAndBest:
    """Orbax's preservation policy: the last `keep_last` checkpoints and that of step `best`."""

    keep_last: int
    best: int | None = None

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        kept = {checkpoint.step for checkpoint in checkpoints[-self.keep_last :]} | {self.best}
        return [checkpoint.step in kept for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of a run: the last few, and the best."""

    def __init__(self, directory: pathlib.Path, *, keep_last: int):
        """Opens or makes the directory, and removes what a kill left half-written.

        Args:
          directory: of checkpoints alone; damaged/ lies beside it.
          keep_last: number of checkpoints to keep, apart from the best.
        Raises:
          WorkdirError: the directory cannot be read or made.
        """
        self._directory = directory.absolute()
        self._in_flight: int | None = None
        self._good: int | None = None
        self._keep = _LastAndBest(keep_last)
        self._verbosity = logging.get_verbosity()
        # Orbax logs pages about a failure, which would hide the one line of ours.
        logging.set_verbosity(logging.FATAL)
        orbax_io.hide_abandoned()
        with self._explained("opened"):
            marked = distributed.compute_on_first(self._needs_markers)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._keep,
            cleanup_tmp_directories=True,
            temporary_path_class=atomicity.CommitFileTemporaryPath if marked else None,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_file_sums),
        )
        with self._explained("opened"):
            self._manager = ocp.CheckpointManager(self._directory, options=options)
            self._good = self._manager.latest_step()

    def _needs_markers(self) -> bool:
        """Returns whether Orbax marks whole checkpoints by a last file instead of by their name."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if files.renames_directories(self._directory):
            return False
        for sums in self._directory.glob(f"*/{_FILE_SUMS}"):  # whole, perhaps by their name
            (sums.parent / atomicity.COMMIT_SUCCESS_FILE).touch()
        return True

    def steps(self) -> list[int]:
        """Steps of all checkpoints, in order."""
        return sorted(self._manager.all_steps())

    @property
    def good_step(self) -> int | None:
        """Step of the newest checkpoint that is known to be whole; None if there is none."""
        return self._good

    def save(
        self, step: int, state: TrainState, metadata: Mapping[str, Any], *, best: int | None
    ) -> None:
        """Copies the state and writes it in the background, once the save before is finished.

        Args:
          step: number of steps done.
          state: may be donated as soon as this returns.
          metadata: further content, as JSON has it.
          best: step of the best checkpoint, which is kept; None if there is none.
        Raises:
          WorkdirError: this or an earlier save cannot be written.
        """
        self.wait()
        arrays = states.flatten(state)
        sums = {name: int(x) for name, x in jax.device_get(states.checksums(arrays)).items()}
        self._in_flight, self._keep.best = step, best
        with self._explained("written"):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        _STATE: ocp.args.PyTreeSave(arrays),
                        _METADATA: ocp.args.JsonSave({**metadata, "checksums": sums}),
                    }
                ),
            )

    def poll(self) -> None:
        """Raises WorkdirError if the save in the background has failed."""
        if self._in_flight is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is finished.

        Raises:
          WorkdirError: it cannot be written.
        """
        if self._in_flight is None:
            return
        with self._explained("written"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self._good, self._in_flight = self._in_flight, None

    def restore(self, like: TrainState, note: Callable[[str], None]) -> RestoredCheckpoint | None:
        """Restores the newest good checkpoint, and moves damaged ones to damaged/.

        A wrong checksum or a missing file is damage. After any other failure the checkpoints stay
        as they are.

        Args:
          like: abstract; says where the arrays go.
          note: called with one line for each damaged checkpoint.
        Returns:
          The checkpoint; None if there has never been one.
        Raises:
          WorkdirError: the newest one cannot be read, though it is not damaged; or all are
            damaged, now or at an earlier start.
        """
        found = distributed.broadcast(self.steps())
        for step in reversed(found):
            restored, damage = self._try(step, like)
            if restored is None:
                earlier = [other for other in found if other < step]
                what_next = (
                    f"going back to step {earlier[-1]}" if earlier else "it was the only one"
                )
                note(f"checkpoint of step {step} is damaged ({damage}): {what_next}")
                self._set_aside(step)
                continue
            self._good = step
            return restored
        damaged = self._directory.parent / DAMAGED
        if damaged.is_dir() and any(damaged.iterdir()):
            raise errors.WorkdirError(
                f"{damaged}: the checkpoints here are damaged and no good one is left: delete this "
                "directory to start again at step 0, or use another --workdir"
            )
        return None

    def close(self) -> None:
        """Waits for a save in the background, whether it succeeds or not."""
        try:
            with contextlib.suppress(Exception):
                self._manager.close()
        finally:
            logging.set_verbosity(self._verbosity)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _try(self, step: int, like: TrainState) -> tuple[RestoredCheckpoint | None, str]:
        """A restored checkpoint, or what is damaged in it; all processes come to the same.

        Raises:
          WorkdirError: it cannot be read, though it is not damaged.
        """
        path = self._directory / str(step)
        # Before any process begins to restore, which all can only do together.
        damage = next(filter(None, agreement.gather("damage", _find_damage(path))), None)
        if damage is not None:
            return None, damage
        try:
            return self._restore(step, like), ""
        except _ChecksumError as error:  # of whole arrays, so every process finds it
            return None, _reason(error)
        except Exception as error:  # Orbax and tensorstore raise a dozen kinds
            # A missing file is named by the error too where an earlier version left no files.json.
            if isinstance(error, FileNotFoundError) and jax.process_count() == 1:
                return None, _reason(error)
            raise errors.WorkdirError(
                f"{path}: cannot be restored: {_reason(error)}; nothing was changed, so try again; "
                "if it keeps failing, delete this directory to continue from the checkpoint "
                "before it"
            ) from error

    def _restore(self, step: int, like: TrainState) -> RestoredCheckpoint:
        arrays = states.flatten(like)
        restore = ocp.args.PyTreeRestore(
            arrays, restore_args=ocp.checkpoint_utils.construct_restore_args(arrays)
        )
        content = self._manager.restore(
            step, args=ocp.args.Composite(**{_STATE: restore, _METADATA: ocp.args.JsonRestore()})
        )
        metadata = dict(content[_METADATA])
        wanted = metadata.pop("checksums")
        sums = jax.device_get(states.checksums(content[_STATE]))
        wrong = [name for name in arrays if int(sums[name]) != wanted[name]]
        if wrong:
            raise _ChecksumError(f"the checksum of {wrong[0]} is wrong")
        return RestoredCheckpoint(step, states.unflatten(like, content[_STATE]), metadata)

    def _write_file_sums(self) -> None:
        """Adds files.json to the checkpoint in flight; the first process calls it, then commits."""
        # Where a directory cannot be renamed, Orbax writes into the final one.
        unfinished = list(self._directory.glob(f"{self._in_flight}.orbax-checkpoint-tmp*"))
        path = unfinished[0] if unfinished else self._directory / str(self._in_flight)
        written = [file for item in (_STATE, _METADATA) for file in (path / item).rglob("*")]
        sums = {str(x.relative_to(path)): files.checksum(x) for x in written if x.is_file()}
        files.write_whole(path / _FILE_SUMS, json.dumps(sums))

    def _set_aside(self, step: int) -> None:
        """Moves a checkpoint to damaged/, so that its step can be saved again."""
        if jax.process_index() == 0:
            aside = self._directory.parent / DAMAGED / str(step)
            files.remove_tree(aside)
            aside.parent.mkdir(exist_ok=True)
            files.move_tree(self._directory / str(step), aside)
        agreement.barrier(f"checkpoint {step} set aside")
        self._manager.reload()

    @contextlib.contextmanager
    def _explained(self, what: str):
        """Turns any failure into one line that names the last good checkpoint."""
        try:
            yield
        except Exception as error:  # nested ones of Orbax, tensorstore and the system
            which = "" if self._in_flight is None else f" of step {self._in_flight}"
            left = "there is none before it"
            if self._good is not None:
                left = f"the last good one, of step {self._good}, is kept"
            self._in_flight = None
            raise errors.WorkdirError(
                f"{self._directory}: checkpoint{which} cannot be {what}: {_reason(error)}; {left}"
            ) from error


def _find_damage(path: pathlib.Path) -> str | None:
    """What this process finds damaged in its share of a checkpoint's files; None for nothing."""
    name = _FILE_SUMS
    try:
        sums = json.loads((path / _FILE_SUMS).read_text())
        for name in sorted(sums)[jax.process_index() :: jax.process_count()]:
            if not files.same_checksum(files.checksum(path / name), sums[name]):
                return f"the checksum of {name} is wrong"
    except ValueError:
        return f"{_FILE_SUMS} is not JSON"
    except FileNotFoundError:
        return None if name == _FILE_SUMS else f"{name} is missing"
    except OSError:
        return None  # what cannot be read cannot be judged
    return None


def _reason(error: BaseException) -> str:
    """The first cause of an error, in a few words."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    known = _REASON.search(text)
    return known.group() if known else errors.shorten(text, 120)
