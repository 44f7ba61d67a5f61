"""Fuzzes `dflash` in this process with random command lines and damaged files.

    python tools/fuzz_commands.py [--lines=1000] [--files=100] [--seed=0] [--start=0]

Each case must end in time with a known status. An error must be plain lines on stderr, with nothing
on stdout, and a printed config must contain the values of the command line. A failing case is
printed with its number; --start=NUMBER repeats it. Nothing is compiled: the commands only plan or
print.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import random
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence

import tokenizers

from dflash import __main__ as program
from dflash.checkpoints import safetensors_header
from dflash.config import loader, strict_yaml

GOLDEN = pathlib.Path(__file__).parents[1] / "tests" / "golden" / "qwen3_b1"
ASSETS = pathlib.Path(loader.__file__).parents[1] / "assets"
LIMIT_SECONDS = 30
STATUSES = (0, 1, 2, 3)
CONFIG = """\
target: {checkpoint: target}
drafter: {name: dflash, checkpoint: draft}
decode: {max_new_tokens: 4}
prompts: {file: prompts.jsonl}
dtype: float32
"""
PROMPTS = '{"prompt_ids": [3, 4]}\n{"prompt_ids": [5]}\n'
# Valid command lines, into which mistakes are inserted.
LINES = (
    "decode c.yml --print_config decode.seed=3 drafter.block_size=4 dtype=float32",
    "decode c.yml --print_config prompts.text=[a,b] decode.stop_ids=[1] mesh.tensor=2",
    "decode configs/tiny_dflash.yml --print_config decode.temperature=0.5 drafter.tree.budget=9",
    "decode configs/qwen3_4b_eagle3.yml --print_config drafter.name=ngram drafter.longest_match=2",
    "train configs/train/qwen3_4b_dflash.yml --print_config train.steps=5 loss.name=kl",
    "train configs/train/qwen3_4b_eagle3.yml --print_config optimizer.name=muon data.seed=2",
    "benchmark configs/benchmark/tiny.yml --print_config rounds=2 tasks=[math] decode.top_k=4",
    "benchmark configs/benchmark/qwen3_4b_trace.yml --print_config --acceptance math500 rounds=1",
    "sweep configs/sweeps/block_size.yml --dry_run decode.max_new_tokens=8",
    "sweep configs/tiny_dflash.yml --dry_run sweep.product.decode.seed=[1,2]",
    "compile configs/random_tiny_dflash.yml --print_config tpu.topology=v5e:1x1",
    "decode c.yml --dry_run decode.batch_size=2 decode.max_new_tokens=8",
    "train configs/train/dflash2.yml target.checkpoint=words --dry_run data.length=64",
    "convert target out --to=orbax --dtype=float32",
    "doctor --help",
)
TEXTS = """
    null ~ true no 0 -1 1 1.5 1e3 1e400 .nan -.inf 2147483648 999999999999999999999 a auto [] {}
    [0] [[[]]] {a:1} [1,a,null] a:b ' " *x !!int % # \udcff é 一 🙂 -- - = == . .. / ~/x ~nobody/x
    /dev/null /proc/self/mem /nonexistent/x hf: hf:a hf:a/b@c %s {0} $HOME `x` ;ls --help random
    --workdir=w
    --workdir --print_config --nodry_run --dry_run=maybe --process_id=99999999999 base=x sweep.run=x
    decode decode= =x a.b.c=1 .=1 ..=1 decode.=1 decode..seed=1 target=null drafter={} drafter=ngram
    drafter.name=none strategies.x=null tasks= c.yml prompts.jsonl target configs dtype
""".split()
LONG = ("x" * 5000, "[" * 3000, "a." * 3000 + "=1", "é" * 300, "decode.seed=" + "9" * 5000, "")
FILES = {
    "c.yml": "decode c.yml --dry_run",
    "prompts.jsonl": "decode c.yml --dry_run",
    "target/config.json": "decode c.yml --dry_run",
    "target/generation_config.json": "decode c.yml --dry_run",
    "draft/config.json": "decode c.yml --dry_run",
    "target/model.safetensors": "convert target out1 --to=hf",
    "draft/model.safetensors": "convert draft out2 --to=hf",
    "shards/model.safetensors.index.json": "convert shards out3 --to=hf",
    "bpe/tokenizer.json": "decode b.yml --dry_run",
    "words/tokenizer.model": "decode c.yml --dry_run target.checkpoint=words drafter.name=none",
    "words/tokenizer_config.json": "decode t.yml --dry_run",
    "words/chat_template.jinja": "decode t.yml --dry_run",
    "trace.json": "benchmark configs/benchmark/random_tiny.yml --trace=trace.json --dry_run",
}


class Hang(Exception):
    """Raised if a case takes too long."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a command line.

    Attributes:
      status: Exit status.
      out: Text on stdout.
      err: Text on stderr.
      raised: Traceback of an exception that escaped; empty otherwise.
    """

    status: object
    out: str
    err: str
    raised: str = ""


def run(argv: Sequence[str]) -> Outcome:
    """Runs a command line in this process, as the shell would, with empty input."""
    out, err, raised, status = io.StringIO(), io.StringIO(), "", None
    stdin, sys.stdin = sys.stdin, io.StringIO("")

    def ring(*_):
        raise Hang(f"no end within {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = program.main(list(argv))
    except SystemExit as caught:
        status = caught.code
    except BaseException:  # Any escaped exception is a finding.
        raised = traceback.format_exc(limit=-6)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        sys.stdin = stdin
    return Outcome(status, out.getvalue(), err.getvalue(), raised)


def verdict(argv: Sequence[str], outcome: Outcome) -> str | None:
    """Returns the problem of a command line's result, or None."""
    if outcome.raised:
        return outcome.raised
    if outcome.status not in STATUSES:
        return f"status {outcome.status!r}"
    if "Traceback" in outcome.err:
        return outcome.err
    lines = outcome.err.splitlines()
    if outcome.status == 2:
        if outcome.out:
            return f"an error, and output: {outcome.out[:200]!r}"
        if not lines or not lines[-1].startswith(("error: ", "usage: ", "  ")):
            return f"no line that says why: {outcome.err[-300:]!r}"
    if any(len(line) > 2000 for line in lines):
        return "a line of more than 2000 characters"
    if outcome.status == 0 and "--print_config" in argv and outcome.out.startswith("target:"):
        return misunderstood(argv, outcome.out)
    return None


def misunderstood(argv: Sequence[str], printed: str) -> str | None:
    """Returns a problem if the printed config lacks the value of a `key=value`, or None."""
    shown = dict(loader.flatten(_plain(strict_yaml.parse(printed, "printed")[0])))
    given = dict(one.partition("=")[::2] for one in argv[2:] if "=" in one and one[0] != "-")
    for key, text in given.items():
        if key not in shown:
            continue  # The key is a group, or another argument replaced it.
        value = shown[key]
        typed = _plain(strict_yaml.parse_value(text, "typed"))
        same = text == value or typed == value or [typed] == value or [text] == value
        if not same and isinstance(typed, int | float) and isinstance(value, int | float):
            same = math.isclose(typed, value)
        if not same and not isinstance(typed, dict | list):
            return f"{key}: typed {text!r}, understood {value!r}"
    return None


def _plain(node: strict_yaml.Node):
    if isinstance(node.value, dict):
        return {key: _plain(one) for key, one in node.value.items()}
    if isinstance(node.value, tuple):
        return [_plain(one) for one in node.value]
    return node.value


def make_line(chance: random.Random) -> list[str]:
    """Returns a valid command line with up to four mistakes inserted."""
    words = shlex.split(chance.choice(LINES))
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        at = chance.randrange(len(words) + 1)
        odd = chance.choice(LONG) if chance.random() < 0.1 else chance.choice(TEXTS)
        other = chance.choice(shlex.split(chance.choice(LINES)))
        match chance.randrange(7):
            case 0:
                words.insert(at, odd)
            case 1:
                words.insert(at, other)
            case 2:
                words = words[:at] + words[at + 1 :]
            case 3:
                words = words[:at] + words[at : at + 1] * 2 + words[at + 1 :]
            case 4:
                chance.shuffle(words)
            case 5:
                words = [
                    _altered(word, chance) if i == at else word for i, word in enumerate(words)
                ]
            case 6:
                keys = [i for i, word in enumerate(words) if "=" in word]
                if keys:
                    place = chance.choice(keys)
                    words[place] = f"{words[place].partition('=')[0]}={odd}"
    if words and words[0] in ("decode", "train", "benchmark", "sweep"):
        words += [] if "--print_config" in words else ["--dry_run"]
    return words


def _altered(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice(["", "x", "=", ".", "-", " ", "é", text]) + text[at + 1 :]


def damage(content: bytes, chance: random.Random) -> bytes:
    """Returns the content with a part lost, repeated, flipped or replaced."""
    at = chance.randrange(len(content) + 1)
    length = chance.choice((1, 1, 4, 64, 4096))
    match chance.randrange(8):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + length :]
        case 2:
            return content[:at] + content[at : at + length] + content[at:]
        case 3:
            flipped = bytes(byte ^ (1 << chance.randrange(8)) for byte in content[at : at + length])
            return content[:at] + flipped + content[at + length :]
        case 4:
            return content[:at] + bytes(length) + content[at + length :]
        case 5:
            odd = chance.choice(TEXTS).encode("utf-8", "surrogateescape")
            return content[:at] + odd + content[at:]
        case 6:
            # Damage the header, which determines how a file of weights is read.
            at = chance.randrange(min(len(content), 200) + 1)
            return content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :]
    return chance.choice((b"", b"\xff\xfe" + content, b"[]", b"{}", b"null", content * 2))


@contextlib.contextmanager
def place() -> Iterator[pathlib.Path]:
    """Enters a temporary working directory with all files that the command lines name."""
    before = pathlib.Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        shutil.copytree(GOLDEN / "target", root / "target")
        shutil.copytree(GOLDEN / "draft", root / "draft")
        shutil.copytree(ASSETS / "tiny_target", root / "words")
        (root / "words" / "model.safetensors").unlink()  # Plans read no weights.
        shutil.copytree(GOLDEN / "target", root / "shards")
        tensors = safetensors_header.read_headers(root / "shards")
        index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (root / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copytree(GOLDEN / "target", root / "bpe")
        letters = tokenizers.Tokenizer(
            tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
        )
        letters.add_special_tokens(["<s>"])
        letters.save(str(root / "bpe" / "tokenizer.json"))
        (root / "b.yml").write_text(
            "base: [c.yml]\ntarget: {checkpoint: bpe}\n"
            "drafter: {name: none}\nprompts: {text: [abba]}\n"
        )
        (root / "c.yml").write_text(CONFIG)
        chat = "prompts: {text: [Hello], chat: true}\n"
        (root / "t.yml").write_text(
            f"base: [c.yml]\ntarget: {{checkpoint: words}}\ndrafter: {{name: none}}\n{chat}"
        )
        (root / "prompts.jsonl").write_text(PROMPTS)
        recorded = [{"dataset": "math500", "prompt_tokens": 9, "acceptance_lengths": [1, 3, 2]}]
        (root / "trace.json").write_text(json.dumps(recorded))
        os.chdir(root)
        try:
            yield root
        finally:
            os.chdir(before)


def lines(count: int, seed: int, start: int = 0) -> Iterator[tuple[int, list[str], str]]:
    """Yields (number, command line, problem) of the random command lines that fail."""
    with place() as root:
        for number in range(start, start + count):
            argv = make_line(random.Random(f"{seed} line {number}"))
            wrong = verdict(argv, run(argv))
            if wrong is not None:
                yield number, argv, wrong
            for left in ("out", "w"):  # outputs of conversions and tokenizers
                shutil.rmtree(root / left, ignore_errors=True)


def files(count: int, seed: int, start: int = 0) -> Iterator[tuple[int, list[str], str]]:
    """Yields (number, file and command line, problem) of the damaged files that fail."""
    for number in range(start, start + count):
        chance = random.Random(f"{seed} file {number}")
        name = chance.choice(list(FILES))
        with place() as root:
            path = root / name
            path.write_bytes(damage(path.read_bytes(), chance))
            argv = shlex.split(FILES[name])
            wrong = verdict(argv, run(argv))
        if wrong is not None:
            yield number, [name, *argv], wrong


def main() -> int:
    """Runs all cases; returns 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    given = parser.parse_args()
    kinds: tuple[tuple[str, Callable, int], ...] = (
        ("line", lines, given.lines),
        ("file", files, given.files),
    )
    bad = 0
    for kind, cases, count in kinds:
        for number, argv, wrong in cases(count, given.seed, given.start):
            bad += 1
            print(f"\n{kind} {number}: {shlex.join(argv)[:300]}\n{wrong}", flush=True)
    print(f"{bad} of {given.lines + given.files} cases failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
