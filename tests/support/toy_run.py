"""Trains the toy model in a process of its own, or in one of several.

    python toy_run.py DIR STEPS CHECKPOINT_EVERY PAUSE_S [ADDRESS PROCESSES PROCESS]

With a pause, it waits after two checkpoints until DIR/go is there. Exits with the outcome's status,
as the real command does; writes DIR/final.npz at the end.
"""

import itertools
import pathlib
import sys
import time

import jax
import numpy as np

from dflash import errors
from dflash.parallel import distributed
from support import toy


def main() -> int:
    directory, steps, every, pause_s, *processes = sys.argv[1:]
    mesh = (1, 1, 1)
    if processes:
        address, count, index = processes
        distributed.initialize(address, int(count), int(index))
        mesh = (int(count), 1, 1)
    run = toy.Run(pathlib.Path(directory), steps=int(steps), checkpoint_every=int(every), mesh=mesh)
    if float(pause_s):
        slow_down(float(pause_s), 3 * int(every), run.directory / "go")
    try:
        outcome = run.go()
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    if not outcome.exit_status and jax.process_index() == 0:
        np.savez(run.directory / "final.npz", **toy.arrays(outcome))
    return outcome.exit_status


def slow_down(pause_s: float, batches: int, go: pathlib.Path) -> None:
    """Makes every batch take a while, and lets no more than `batches` pass before `go` is there.

    So a signal arrives during the run, however late it is sent.
    """
    read, count = toy.Counting.__next__, itertools.count()

    def read_slowly(self):
        time.sleep(pause_s)
        held = next(count) >= batches
        while held and not go.exists():
            time.sleep(pause_s)
        return read(self)

    toy.Counting.__next__ = read_slowly


if __name__ == "__main__":
    sys.exit(main())
