"""Trains with four processes over loopback and kills one of them, again and again.

    python tools/kill_training.py [--kills=20] [--seed=0] [--soon_s=20] [key=value ...]

Each start runs until a random moment at which a random process gets signal 9, and is followed by
the same command. Every start but the first must say after which checkpoint it continues, the
processes that are left must leave within `soon_s` (a busy machine takes more), and what a run has
come to in the end must be, bit for bit, what it comes to undisturbed. A run that ends before all
kills are done is followed by another one.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import random
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from support import forked, xla_flags

os.environ["XLA_FLAGS"] = xla_flags.quick(devices=1)
os.environ["JAX_PLATFORMS"] = "cpu"
from support.models import BYTE_TARGET

from dflash import train
from dflash.training import (
    rundir,
    train_job,  # noqa: F401  # before processes are forked
)

COUNT = 4
LONG_S = 600  # for a whole run, on a busy machine
CONFIG = f"""
task: target
target: {BYTE_TARGET}
mesh: {{data: 2, fsdp: 2}}
data: {{files: [DIRECTORY/text.jsonl], data_dir: DIRECTORY/data, length: 32, held_out_percent: 20}}
train: {{steps: 30, batch_size: 4, dtype: float32, log_every: 2, checkpoint_every: 3,
  export_dtype: float32}}
evaluation: {{every: 10, batches: 1, prompts: 0}}
"""
_BEGUN = re.compile(r"(?:continuing after )?step (\d+)\b")


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the command.

    Attributes:
      killed: the process that was killed; None where all ended by themselves.
      moment: seconds from the start to the kill.
      soon_s: seconds from the kill within which all others must have left.
      left_after: seconds from the kill until all others had left; None if some had not.
      found: newest checkpoint at the start; None if there was none.
      ends: of all processes.
    """

    killed: int | None
    moment: float
    soon_s: float
    left_after: float | None
    found: int | None
    ends: list[forked.End | None]

    @property
    def problems(self) -> list[str]:
        """What is wrong with it."""
        found = []
        if self.left_after is None or self.left_after > self.soon_s:
            found.append(f"not all have left within {self.soon_s:g} s")
        statuses = [one and one.status for one in self.ends]
        if self.killed is None and any(statuses):
            found.append(f"statuses {statuses} without a kill")
        lines = [line for one in self.ends if one for line in one.lines]
        found += [line for line in lines if line.startswith("Traceback")]
        first = self.ends[0].lines if self.ends[0] else []
        begun = next((line for line in first if _BEGUN.match(line)), None)
        if begun and self.found is not None and begun != f"continuing after step {self.found}":
            found.append(f"the newest checkpoint is of step {self.found}, but it says: {begun}")
        return found


class Run:
    """A training run in a directory of its own."""

    def __init__(self, root: pathlib.Path, name: str, overrides: list[str], soon_s: float):
        self._root, self._overrides, self._soon_s = root, overrides, soon_s
        self.directory = root / name

    def start(self, killed: int | None = None, moment: float = LONG_S) -> Start:
        """Starts all processes, and kills one of them after a while unless all have ended.

        Args:
          killed: which one; None: all end by themselves.
          moment: seconds until then.
        """
        found = self._newest()
        with forked.Forked(
            functools.partial(train_one, self._command()), COUNT, self._root
        ) as all_:
            if all_.wait(moment) or killed is None or not all_.kill(killed):
                killed, moment = None, 0.0
            begin = all_.seconds
            left = all_.wait(self._soon_s) and all_.seconds - begin
            left = None if left is False else left
            return Start(killed, moment, self._soon_s, left, found, all_.ends)

    def result(self) -> dict[str, str]:
        """Hashes of all that the run has come to."""
        found = {
            str(path.relative_to(self.directory)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((self.directory / rundir.EXPORT).rglob("*"))
            if path.is_file()
        }
        newest = self.directory / rundir.CHECKPOINTS / str(self._newest())
        facts = json.loads((newest / "facts" / "metadata").read_text())
        found[f"step {newest.name}"] = json.dumps(facts["checksums"], sort_keys=True)
        lines = (self.directory / rundir.METRICS).read_text().splitlines()
        times = ("tokens_per_second", "seconds", "time")
        logged = [
            {key: value for key, value in json.loads(line).items() if key not in times}
            for line in lines
        ]
        found[rundir.METRICS] = json.dumps(logged)
        return found

    def _newest(self) -> int | None:
        steps = (self.directory / rundir.CHECKPOINTS).glob("*")
        return max((int(one.name) for one in steps if one.name.isdecimal()), default=None)

    def _command(self) -> list[str]:
        cache = f"--compilation_cache={self._root / 'programs'}"
        places = [f"--workdir={self.directory}", cache]
        return [str(self._root / "c.yml"), *self._overrides, *places]


def train_one(command: list[str], given: tuple[str, int, int]) -> int:
    """One process of a start; returns its exit status."""
    names = ("coordinator_address", "num_processes", "process_id")
    try:
        train.main(
            [*command, *(f"--{name}={value}" for name, value in zip(names, given, strict=True))]
        )
    except SystemExit as end:
        return end.code


def prepare(root: pathlib.Path) -> None:
    """Writes the config and something to train on."""
    (root / "c.yml").write_text(CONFIG.replace("DIRECTORY", str(root)))
    lines = ({"prompt": f"{i} and {i + 1}", "response": f"is {2 * i + 1}"} for i in range(400))
    (root / "text.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def kill(
    root: pathlib.Path, kills: int, seed: int, soon_s: float, overrides: list[str]
) -> list[str]:
    """Trains and kills; returns what is wrong."""
    prepare(root)
    forked.share_programs()
    whole = Run(root, "whole", overrides, soon_s)
    start = whole.start()
    if start.problems:
        return [*start.problems, *start.ends[0].lines]
    wanted, length = whole.result(), max(one.seconds for one in start.ends)
    print(f"undisturbed: {length:.1f} s")
    draw, done, slowest, problems, number = random.Random(seed), 0, 0.0, [], 0
    run = Run(root, "run0", overrides, soon_s)
    while True:
        victim, moment = draw.randrange(COUNT), draw.uniform(0, length)
        start = run.start(victim, moment) if done < kills else run.start()
        wrong = start.problems
        if start.killed is not None:
            done, slowest = done + 1, max(slowest, start.left_after or soon_s)
            print(
                f"kill {done}: process {victim} at {start.moment:.2f} s, from step {start.found} "
                f"on; all had left after {start.left_after or soon_s:.1f} s"
            )
        else:
            result = run.result()
            wrong += [f"{name} differs" for name in wanted if result.get(name) != wanted[name]]
            print(f"{run.directory.name}: ended")
            number += 1
            run = Run(root, f"run{number}", overrides, soon_s)
        if wrong:
            problems += wrong
            print(*wrong, *(line for one in start.ends if one for line in one.lines), sep="\n  ")
        if start.killed is None and done >= kills:
            break
    print(f"{done} kills, {number} runs; the others left after {slowest:.1f} s at most")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soon_s", type=float, default=20)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        problems = kill(
            pathlib.Path(directory), given.kills, given.seed, given.soon_s, given.overrides
        )
    print("\n".join(problems) or "nothing wrong")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
