"""Trains with four processes over loopback and kills one of them, again and again.

    python tools/kill_training.py [--kills=20] [--seed=0] [--soon_s=20] [key=value ...]

Each start runs until a random process gets signal 9 at a random moment, then the command is started
again. Every start but the first must print the checkpoint that it continues from. The remaining
processes must exit within `soon_s` seconds, which a busy machine may exceed. The final result of a
run must be identical, bit by bit, to that of an undisturbed run. A run that ends before all kills
are done is followed by another run.
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
    train_job,  # noqa: F401  # Import it before processes are forked.
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
    """Result of one start of the command.

    Attributes:
      killed: Index of the killed process; None if all processes ended by themselves.
      moment: Seconds from the start to the kill.
      soon_s: Seconds from the kill within which all others must exit.
      left_after: Seconds from the kill until all others exited; None if some did not.
      found: Newest checkpoint at the start; None if there was none.
      ends: Result of each process.
    """

    killed: int | None
    moment: float
    soon_s: float
    left_after: float | None
    found: int | None
    ends: list[forked.End | None]

    @property
    def problems(self) -> list[str]:
        """Problems of the start, one line each."""
        found = []
        if self.left_after is None or self.left_after > self.soon_s:
            found.append(f"some processes did not exit within {self.soon_s:g} s")
        statuses = [one and one.status for one in self.ends]
        if self.killed is None and any(statuses):
            found.append(f"statuses {statuses} without a kill")
        lines = [line for one in self.ends if one for line in one.lines]
        found += [line for line in lines if line.startswith("Traceback")]
        first = self.ends[0].lines if self.ends[0] else []
        begun = next((line for line in first if _BEGUN.match(line)), None)
        if begun and self.found is not None and begun != f"continuing after step {self.found}":
            found.append(
                f"the newest checkpoint has step {self.found}, but the run printed: {begun}"
            )
        return found


class Run:
    """Training run in a directory of its own."""

    def __init__(self, root: pathlib.Path, name: str, overrides: list[str], soon_s: float):
        self._root, self._overrides, self._soon_s = root, overrides, soon_s
        self.directory = root / name

    def start(self, killed: int | None = None, moment: float = LONG_S) -> Start:
        """Starts all processes, and kills one of them after a while unless all have ended.

        Args:
          killed: Index of the process to kill; None to let all processes end by themselves.
          moment: Seconds until the kill.
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
        """Returns hashes of the exported weights, the state and the metrics, by name."""
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
    """Runs one process of a start; returns its exit status."""
    names = ("coordinator_address", "num_processes", "process_id")
    try:
        train.main(
            [*command, *(f"--{name}={value}" for name, value in zip(names, given, strict=True))]
        )
    except SystemExit as end:
        return end.code


def prepare(root: pathlib.Path) -> None:
    """Writes the config and the training data."""
    (root / "c.yml").write_text(CONFIG.replace("DIRECTORY", str(root)))
    lines = ({"prompt": f"{i} and {i + 1}", "response": f"is {2 * i + 1}"} for i in range(400))
    (root / "text.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def kill(
    root: pathlib.Path, kills: int, seed: int, soon_s: float, overrides: list[str]
) -> list[str]:
    """Trains and kills; returns all problems, one line each."""
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
                f"on; all others exited after {start.left_after or soon_s:.1f} s"
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
    print(f"{done} kills, {number} runs; the others exited after at most {slowest:.1f} s")
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
    print("\n".join(problems) or "no problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
