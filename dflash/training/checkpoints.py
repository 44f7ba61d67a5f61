"""Checkpoints of the training state, written atomically in the background.

Orbax writes and commits them. Each checkpoint also holds two kinds of checksums: one of every
array, because a flipped bit in compressed data may be restored without an error; and one of every
file, in files.json, to tell damage from other causes of a failed restore, such as a lack of memory.
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

DAMAGED = "damaged"  # Directory that damaged checkpoints are moved to.

_STATE, _METADATA = "state", "facts"
_FILE_SUMS = "files.json"
_REASON = re.compile(
    r"No space left on device|File too large|Disk quota exceeded|Permission denied|"
    r"Read-only file system|Input/output error|Too many open files|Cannot allocate memory"
)


class _ChecksumError(Exception):
    """A restored array does not have its saved checksum."""


@dataclasses.dataclass(frozen=True)
class RestoredCheckpoint:
    """Restored checkpoint without damage."""

    step: int
    state: TrainState
    metadata: dict[str, Any]


@dataclasses.dataclass
class _LastAndBest:
    """Preservation policy for Orbax: the last `keep_last` checkpoints and that of step `best`."""

    keep_last: int
    best: int | None = None

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        steps = {checkpoint.step for checkpoint in checkpoints[-self.keep_last :]} | {self.best}
        return [checkpoint.step in steps for checkpoint in checkpoints]


class Checkpoints(contextlib.AbstractContextManager):
    """Checkpoints of a run: the last few and the best."""

    def __init__(self, directory: pathlib.Path, *, keep_last: int):
        """Opens or creates the directory and removes incomplete checkpoints of a killed run.

        Args:
          directory: Directory for checkpoints only; damaged/ is created beside it.
        Raises:
          WorkdirError: The directory cannot be read or created.
        """
        self._directory = directory.absolute()
        self._in_flight: int | None = None
        self._good: int | None = None
        self._keep = _LastAndBest(keep_last)
        self._verbosity = logging.get_verbosity()
        # Silence Orbax: its long logs of a failure would hide our one-line error message.
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
        """Returns whether complete checkpoints need a marker file, as renames are not atomic."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if files.renames_directories(self._directory):
            return False
        # Mark checkpoints that were completed by a rename, before markers were in use here.
        for sums in self._directory.glob(f"*/{_FILE_SUMS}"):
            (sums.parent / atomicity.COMMIT_SUCCESS_FILE).touch()
        return True

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, in order."""
        return sorted(self._manager.all_steps())

    @property
    def good_step(self) -> int | None:
        """Step of the newest checkpoint that is known to be complete; None if there is none."""
        return self._good

    def save(
        self, step: int, state: TrainState, metadata: Mapping[str, Any], *, best: int | None
    ) -> None:
        """Copies the state and writes the copy in the background, after any earlier save.

        Args:
          state: Training state; may be donated as soon as this method returns.
        Raises:
          WorkdirError: This or an earlier checkpoint cannot be written.
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
        """Waits until the last save is finished."""
        if self._in_flight is None:
            return
        with self._explained("written"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self._good, self._in_flight = self._in_flight, None

    def restore(self, like: TrainState, note: Callable[[str], None]) -> RestoredCheckpoint | None:
        """Restores the newest good checkpoint and moves damaged ones to damaged/.

        A wrong checksum or a missing file is damage. Any other failure leaves the checkpoints
        untouched.

        Args:
          like: Abstract state with the shardings of the restored arrays.
          note: Called with one line for each damaged checkpoint.
        Returns:
          The checkpoint, or None if none was ever saved.
        Raises:
          WorkdirError: The newest checkpoint cannot be read although it is not damaged, or all
            checkpoints are damaged, now or at an earlier start.
        """
        steps = distributed.broadcast(self.steps())
        for step in reversed(steps):
            restored, damage = self._try(step, like)
            if restored is None:
                earlier = [other for other in steps if other < step]
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
                f"{damaged}: holds damaged checkpoints, and no good one is left: delete this "
                "directory to start again at step 0, or use another --workdir"
            )
        return None

    def close(self) -> None:
        """Waits for a save in the background and ignores its failure."""
        try:
            with contextlib.suppress(Exception):
                self._manager.close()
        finally:
            logging.set_verbosity(self._verbosity)

    def __exit__(self, *unused):
        self.close()

    def _try(self, step: int, like: TrainState) -> tuple[RestoredCheckpoint | None, str]:
        """Returns a restored checkpoint, or None and its damage, equal on all processes."""
        path = self._directory / str(step)
        # Agree on damage first, since restoring is a collective operation of all processes.
        damage = next(filter(None, agreement.gather("damage", _find_damage(path))), None)
        if damage is not None:
            return None, damage
        try:
            return self._restore(step, like), ""
        except _ChecksumError as error:
            # The checksum is that of the global array, so every process raises this error.
            return None, _reason(error)
        except Exception as error:  # Orbax and TensorStore raise many types.
            # Checkpoints of earlier versions have no files.json, so a missing file shows here.
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
        expected = metadata.pop("checksums")
        sums = jax.device_get(states.checksums(content[_STATE]))
        wrong = [name for name in arrays if int(sums[name]) != expected[name]]
        if wrong:
            raise _ChecksumError(f"the checksum of {wrong[0]} is wrong")
        return RestoredCheckpoint(step, states.unflatten(like, content[_STATE]), metadata)

    def _write_file_sums(self) -> None:
        """Adds files.json to the unfinished checkpoint; Orbax calls it on process 0."""
        # Where directories cannot be renamed, Orbax writes into the final one.
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
        try:
            yield
        except Exception as error:  # Nested errors of Orbax, TensorStore and the system.
            which = "" if self._in_flight is None else f" of step {self._in_flight}"
            remedy = "there is no earlier one"
            if self._good is not None:
                remedy = f"the last good one, of step {self._good}, is kept"
            self._in_flight = None
            raise errors.WorkdirError(
                f"{self._directory}: checkpoint{which} cannot be {what}: {_reason(error)}; {remedy}"
            ) from error


def _find_damage(path: pathlib.Path) -> str | None:
    """Checks this process's part of a checkpoint's files; returns the damage found, or None."""
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
        return None  # The file cannot be read; restoring reports that.
    return None


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    known = _REASON.search(text)
    return known.group() if known else errors.shorten(text, 120)
