"""Helpers for both checkpoint layouts: JSON, atomic directories, progress."""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from dflash import errors
from dflash.config import encoding
from dflash.storage.files import copy_file, publish, read_regular, remove_tree, sync

CONFIG = "config.json"
MISFIT = "these weights do not belong to this config.json"
# Files that are copied with the weights, unchanged. Python files are code for other programs, to
# which `auto_map` in config.json refers; dflash never runs them.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
PROGRESS_DELAY_SECONDS = 1.0

Item = TypeVar("Item")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        content = json.loads(encoding.decode(read_regular(path)))
    except FileNotFoundError as error:
        raise errors.CheckpointError(
            f"{path}: missing; is {path.parent} a checkpoint directory?"
        ) from error
    except OSError as error:
        raise errors.CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise errors.CheckpointError(
            f"{path}: not valid JSON (line {error.lineno}: {error.msg})"
        ) from error
    except errors.InputError as error:
        raise errors.CheckpointError(f"{path}: {error}") from error
    except RecursionError as error:
        raise errors.CheckpointError(f"{path}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # Python limits the number of digits of an integer.
        raise errors.CheckpointError(f"{path}: not valid JSON (a number is too long)") from error
    if not isinstance(content, dict):
        raise errors.CheckpointError(f"{path}: expected a JSON object")
    return content


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a JSON object in the format of Hugging Face's files."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_companions(source: pathlib.Path, directory: pathlib.Path) -> None:
    """Copies the tokenizer, generation and licence files of `source`."""
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file():
                copy_file(path, directory / path.name)


@contextlib.contextmanager
def staged(destination: pathlib.Path, marker: str = CONFIG) -> Iterator[pathlib.Path]:
    """Yields an empty directory that is renamed to `destination` when the block ends.

    All processes of a multi-host run must enter; process 0 creates, publishes and cleans up. The
    result is complete once `destination` holds the file `marker`, which the block must write.

    Raises:
      CheckpointError: `destination` exists and is not empty.
      WorkdirError: The directory cannot be written.
    """
    destination = destination.absolute()
    check_vacant(destination)
    partial = destination.with_name(f".{destination.name}.partial")
    first = _process_index() == 0
    try:
        if first:
            destination.parent.mkdir(parents=True, exist_ok=True)
            remove_tree(partial)  # Remove what a killed run left.
            partial.mkdir()
        _barrier(f"{partial} made")
        yield partial
        _barrier(f"{partial} written")
        if first:
            _sync_tree(partial)
            publish(partial, destination, marker)
        _barrier(f"{partial} published")
    except BaseException as error:
        if first:
            with contextlib.suppress(OSError):
                remove_tree(partial)
        if isinstance(error, OSError):
            reason = error.strerror or error
            if isinstance(error, FileExistsError):
                reason = f"{error.filename} is not a directory"
            raise errors.WorkdirError(f"{destination}: cannot be written: {reason}") from error
        raise


def check_vacant(destination: pathlib.Path) -> None:
    """Raises CheckpointError if `destination` is not new or empty, WorkdirError if unreadable."""
    try:
        if destination.is_dir() and not any(destination.iterdir()):
            return
        taken = destination.exists() or destination.is_symlink()
    except OSError as error:
        raise errors.WorkdirError(f"{destination}: cannot be written: {error.strerror}") from error
    if taken:
        raise errors.CheckpointError(
            f"{destination}: already exists and is not an empty directory; "
            "choose another destination or delete it first"
        )


def track(items: Iterable[tuple[Item, int]], total_bytes: int, title: str) -> Iterator[Item]:
    """Yields the items of (item, bytes) pairs, and shows slow work on a terminal as a bar."""
    started, done, bar, task = time.monotonic(), 0, None, None
    try:
        for item, num_bytes in items:
            yield item
            done += num_bytes
            if bar is not None:
                bar.update(task, completed=done)
            elif sys.stderr.isatty() and time.monotonic() - started > PROGRESS_DELAY_SECONDS:
                bar = _make_bar()
                task = bar.add_task(title, total=total_bytes, completed=done)
                bar.start()
    finally:
        if bar is not None:
            bar.stop()


def quote_some(names: Iterable[str]) -> str:
    """Returns the names as text, such as "'a', 'b', 'c' and 7 more"."""
    names = sorted(names)
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def check_names(
    stored: Collection[str],
    expected: Collection[str],
    listing: object,
    misfit: str,
    *,
    file_of: Callable[[str], object] | None = None,
) -> None:
    """Checks that the stored tensors are exactly the expected ones.

    Args:
      listing: File or tree that lists the stored tensors, for messages.
      misfit: What a difference means, for messages; such as `MISFIT`.
      file_of: Function from a stored name to its file; None if it is the listing.
    """
    if missing := set(expected).difference(stored):
        raise errors.CheckpointError(
            f"{listing}: {len(missing)} of {len(expected)} tensors missing: "
            f"{quote_some(missing)}; {misfit}"
        )
    if unexpected := set(stored).difference(expected):
        file = file_of(min(unexpected)) if file_of else listing
        raise errors.CheckpointError(
            f"{file}: {len(unexpected)} unexpected tensors: {quote_some(unexpected)}; {misfit}"
        )


def check_shape(place: object, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Checks the shape of a stored tensor; `place` is the file or tree that holds it."""
    if tuple(shape) != tuple(expected):
        raise errors.CheckpointError(
            f"{place}: tensor {name!r} has shape {list(shape)}, expected {list(expected)}; {MISFIT}"
        )


def _make_bar():
    # Imported late, since small checkpoints never show a bar.
    from rich import console, progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
        transient=True,
    )


def _sync_tree(directory: pathlib.Path) -> None:
    """Flushes a tree to disk, so that a crash cannot leave it incomplete under its final name."""
    for parent, _, names in os.walk(directory):
        for name in names:
            sync(pathlib.Path(parent, name))
        sync(pathlib.Path(parent))


def _process_index() -> int:
    import jax  # Imported late, since readers of config.json do without jax.

    return jax.process_index()


def _barrier(name: str) -> None:
    from dflash.parallel import agreement  # Imported late because it imports jax.

    agreement.barrier(name)
