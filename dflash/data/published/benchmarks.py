r"""Benchmarks that publications on speculative decoding report, as data sets for testing.

| name | rows | raw file (RAW_DIR/…) | prompt | answers |
|---|---|---|---|---|
| math500 | 500 | math500/test.jsonl | problem, `BOXED` | boxed |
| aime24 | 30 | aime24/train-00000-of-00001.parquet | problem, `BOXED` | boxed |
| aime25 | 30 | aime25/train-00000-of-00001.parquet | problem, `BOXED` | boxed |
| gsm8k | 1,319 | gsm8k/test.jsonl | question, `BOXED` | boxed |
| humaneval | 164 | humaneval/HumanEval.jsonl.gz | `TESTED` around the function's head | |
| mbpp | 257 | mbpp/sanitized-mbpp.json | as published | |
| mt-bench | 80 | mt_bench/question.jsonl | as published, two turns | |
| alpaca | 52,002 | alpaca/alpaca_data.json | instruction, then input if any | |
| swe-bench | 300 | swe_bench/test-00000-of-00001.parquet | issue, asked to be fixed | |
| spec-bench | 480 | spec_bench/question.jsonl | as published, up to two turns | of its math |

The templates are those of the evaluation by the DFlash authors: for gsm8k, math500, humaneval, mbpp
and mt-bench in github.com/z-lab/dflash, dflash/benchmark.py; for aime24, aime25, alpaca and
swe-bench in the function `load_and_process_dataset` of public copies of an earlier version.
Spec-Bench (github.com/hemingkx/Spec-Bench) uses its turns without a template.

Every row belongs to the split `test`, so that no benchmark can be trained on by mistake.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from dflash import errors
from dflash.data import answers, files
from dflash.data.dataset import Dataset
from dflash.data.example import Example, Split, shuffled
from dflash.data.published import raw
from dflash.text import jsonl

BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
TESTED = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)
FIX = "Problem Statement:\n{}\nPlease fix the issue described above."
WITH_INPUT = "{}\n\nInput:\n{}"
MBPP_TEST_IDS = range(11, 511)  # the test split, according to the README beside the file

_HUB = "https://huggingface.co/datasets"
_GITHUB = "https://raw.githubusercontent.com"


class Benchmark(Dataset):
    """Data set made of the rows of a published file."""

    raw_file: ClassVar[raw.RawFile]

    @functools.cached_property
    def variant(self) -> str:
        return files.content_hash(str(self._path)).hex()[:16]

    def examples(self, split: Split) -> Iterator[Example]:
        if split != "test":
            return
        for place, row in raw.rows(self._path):
            if not self.belongs(row):
                continue
            try:
                turns, references = self.conversation(row)
            except KeyError as error:
                columns = ", ".join(map(repr, row))
                raise errors.InputError(
                    f"{place}: no {error.args[0]!r}, only {columns}; expected the file of "
                    f"{self.raw_file.url}"
                ) from error
            check_turns(place, turns)
            example = _example(self.name, place.rpartition("/")[2], turns, references)
            yield dataclasses.replace(
                example,
                category=str(row.get("category", "")),
                question=str(row.get("question_id", example.source)),
            )

    def sample(self, split: Split, limit: int | None = None) -> list[Example]:
        everything = list(self.examples(split))
        chosen = shuffled(list(range(len(everything))))[:limit]
        return [everything[index] for index in sorted(chosen)]  # in the order of the file

    def belongs(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a row of the file belongs to the data set."""
        del row
        return True

    @abc.abstractmethod
    def conversation(self, row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        """Returns the messages of the user, and the reference answers to the first of them.

        Raises:
          KeyError: The row lacks a field of this data set.
        """

    @functools.cached_property
    def _path(self):
        directory = raw.raw_directory(self._config.raw_dir, self._config.data_dir)
        return raw.fetch(self.raw_file, directory)


class _Boxed(Benchmark):
    """Problems whose prompt asks for the final answer in a box.

    Attributes:
      question: Column of the problem.
      solution: Column of a worked solution, or None.
      answer: Column of the final answer; None if the solution ends with it.
    """

    has_answers = True
    question: ClassVar[str] = "problem"
    solution: ClassVar[str | None] = "solution"
    answer: ClassVar[str | None] = "answer"

    def conversation(self, row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        # A solution may have several boxes, so the answer is appended in a box of its own.
        parts = [row[self.solution]] if self.solution else []
        parts += [f"\\boxed{{{row[self.answer]}}}"] if self.answer else []
        return [BOXED.format(row[self.question])], ["\n\n".join(parts)]

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        return answers.agree(text, example.response, finished=finished)


class Math500(_Boxed):
    """MATH-500: 500 competition problems of the MATH test set."""

    name = "math500"
    raw_file = raw.RawFile("math500", f"{_HUB}/HuggingFaceH4/MATH-500/resolve/main/test.jsonl")


class Aime24(_Boxed):
    """AIME 2024, both papers."""

    name = "aime24"
    raw_file = raw.RawFile(
        "aime24", f"{_HUB}/HuggingFaceH4/aime_2024/resolve/main/data/train-00000-of-00001.parquet"
    )


class Aime25(_Boxed):
    """AIME 2025, both papers; answers without solutions."""

    name = "aime25"
    solution = None
    raw_file = raw.RawFile(
        "aime25", f"{_HUB}/MathArena/aime_2025/resolve/main/data/train-00000-of-00001.parquet"
    )


class Gsm8k(_Boxed):
    """Test set of GSM8K: word problems of school mathematics."""

    name = "gsm8k"
    question, solution, answer = "question", "answer", None
    raw_file = raw.RawFile(
        "gsm8k", f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
    )


class HumanEval(Benchmark):
    """HumanEval: functions to complete from their docstring."""

    name = "humaneval"
    raw_file = raw.RawFile(
        "humaneval", "https://github.com/openai/human-eval/raw/master/data/HumanEval.jsonl.gz"
    )

    def conversation(self, row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        return [TESTED.format(row["prompt"])], [row["canonical_solution"]]


class Mbpp(Benchmark):
    """Test split of the sanitized MBPP: small Python programs to write from a sentence."""

    name = "mbpp"
    raw_file = raw.RawFile(
        "mbpp", f"{_GITHUB}/google-research/google-research/master/mbpp/sanitized-mbpp.json"
    )

    def belongs(self, row: Mapping[str, Any]) -> bool:
        return row.get("task_id", MBPP_TEST_IDS[0]) in MBPP_TEST_IDS

    def conversation(self, row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        return [row["prompt"]], [row["code"]]


class _Turns(Benchmark):
    def conversation(self, row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        return row["turns"], row.get("reference", ())


class MtBench(_Turns):
    """MT-Bench: 80 questions, each with a follow-up question."""

    name = "mt-bench"
    raw_file = raw.RawFile(
        "mt_bench",
        f"{_GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
    )


class SpecBench(_Turns):
    """Spec-Bench: MT-Bench, translation, summaries, questions, mathematics, retrieval."""

    name = "spec-bench"
    has_answers = True
    raw_file = raw.RawFile(
        "spec_bench", f"{_GITHUB}/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
    )

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        # Only its mathematics, which is from GSM8K, has references with final answers.
        if answers.marked(example.response) is None:
            return None
        return answers.agree(text, example.response, finished=finished)


class Alpaca(Benchmark):
    """Alpaca: instructions, some with an input to work on."""

    name = "alpaca"
    raw_file = raw.RawFile("alpaca", f"{_GITHUB}/tatsu-lab/stanford_alpaca/main/alpaca_data.json")

    def conversation(self, row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        instruction, context = row["instruction"], row["input"]
        prompt = WITH_INPUT.format(instruction, context) if context else instruction
        return [prompt], [row["output"]]


class SweBench(Benchmark):
    """SWE-bench Lite: issues of Python projects."""

    name = "swe-bench"
    raw_file = raw.RawFile(
        "swe_bench",
        f"{_HUB}/princeton-nlp/SWE-bench_Lite/resolve/main/data/test-00000-of-00001.parquet",
    )

    def conversation(self, row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        return [FIX.format(row["problem_statement"])], [row["patch"]]


def check_turns(place: str, turns: Any) -> None:
    """Raises InputError unless the questions of a row are a list of non-empty strings."""
    texts = isinstance(turns, list) and all(isinstance(turn, str) and turn for turn in turns)
    if not turns or not texts:
        raise errors.InputError(f"{place}: expected questions as text, not {jsonl.quote(turns)}")


def _example(task: str, source: str, turns: Sequence[str], references: Sequence[str]) -> Example:
    messages = []
    for index, turn in enumerate(turns):
        reference = references[index] if index < len(references) else ""
        if isinstance(reference, list):  # a list of alternative answers
            reference = reference[0] if reference else ""
        messages += [
            {"role": "user", "content": turn},
            {"role": "assistant", "content": reference},
        ]
    return Example(task, source, tuple(messages))
