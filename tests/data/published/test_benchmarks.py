"""Tests of published data sets, with invented files in their formats."""

import functools
import gzip
import http.server
import json
import threading

import pyarrow
import pytest
import support
from pyarrow import parquet

from dflash import errors
from dflash.config import registry
from dflash.config.train_schema import DataConfig
from dflash.data import datasets, encoding
from dflash.data.published import benchmarks, raw
from dflash.text.tokenizer import ByteTokenizer

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
TURNS = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Again, shorter."]},
    {"question_id": 2, "category": "rag", "turns": ["Read."], "reference": [["Yes.", "Aye."]]},
    {"question_id": 3, "category": "math_reasoning", "turns": ["How many?"],
     "reference": ["Two and two.\n#### 4"]},
]  # fmt: skip
ROWS = {
    "math500": [
        {"problem": "1+1?", "solution": r"$1+1=\boxed{2}$, not \boxed{3}", "answer": "2"},
        {"problem": "Half?", "solution": "Cut it.", "answer": r"\frac{1}{2}"},
    ],
    "aime24": [{"id": 60, "problem": "Find n.", "solution": "n is so.", "answer": "073"}],
    "aime25": [{"problem_idx": 1, "problem": "Find {b}.", "answer": 70}],
    "gsm8k": [{"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}],
    "humaneval": [{"task_id": "a/0", "prompt": "def f():\n", "canonical_solution": "    pass\n"}],
    "mbpp": [
        {"task_id": 2, "prompt": "Of another split.", "code": "x"},
        {"task_id": 11, "prompt": "Write f.", "code": "def f(): pass"},
        {"task_id": 511, "prompt": "Of another split.", "code": "x"},
    ],
    "mt-bench": TURNS[:1],
    "alpaca": [
        {"instruction": "Sum up.", "input": "A text.", "output": "It."},
        {"instruction": "Sing.", "input": "", "output": "La."},
    ],
    "swe-bench": [{"instance_id": "a-1", "problem_statement": "It breaks.", "patch": "--- a"}],
    "spec-bench": TURNS,
}

CUT_SHORT = gzip.compress(json.dumps(ROWS["humaneval"][0]).encode() + b"\n", mtime=0)[:-9]


@pytest.fixture
def raw_dir(tmp_path):
    """Writes the raw file of every data set to its place."""
    for name, rows in ROWS.items():
        file = registry.load(registry.DATASETS[name]).raw_file
        write(tmp_path / file.folder / file.name, rows)
    return tmp_path


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines, mtime=0))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(lines if path.suffix == ".jsonl" else json.dumps(rows).encode())


def first_prompts(name, raw_dir, limit=None):
    found = [one.opening for one in datasets.task_examples(name, limit, raw_dir=str(raw_dir))]
    assert all(len(messages) == 1 for messages in found)
    assert all(messages[0]["role"] == "user" for messages in found)
    return [messages[0]["content"] for messages in found]


def test_every_published_set_is_here():
    """These are the data sets of the published tables, and Spec-Bench."""
    published = {name for name, where in registry.DATASETS.items() if "benchmarks:" in where}
    assert published == set(ROWS)
    for name in published:
        kind = registry.load(registry.DATASETS[name])
        assert kind.name == name
        assert kind.raw_file.url.startswith("https://")


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("math500", [f"1+1?\n{BOXED}", f"Half?\n{BOXED}"]),
        ("aime24", [f"Find n.\n{BOXED}"]),
        ("aime25", [f"Find {{b}}.\n{BOXED}"]),
        ("gsm8k", [f"How many?\n{BOXED}"]),
        ("humaneval", ["Write a solution to the following problem and make sure that it passes the "
                       "tests:\n```python\ndef f():\n\n```"]),
        ("mbpp", ["Write f."]),
        ("mt-bench", ["Write."]),
        ("alpaca", ["Sum up.\n\nInput:\nA text.", "Sing."]),
        ("swe-bench", ["Problem Statement:\nIt breaks.\nPlease fix the issue described above."]),
        ("spec-bench", ["Write.", "Read.", "How many?"]),
    ],
)  # fmt: skip
def test_prompts_are_the_published_ones(raw_dir, name, prompts):
    assert first_prompts(name, raw_dir) == prompts


def test_later_turns_and_references(raw_dir):
    found = datasets.task_examples("spec-bench", raw_dir=str(raw_dir))
    assert [example.later_turns for example in found] == [("Again, shorter.",), (), ()]
    assert [example.response for example in found] == ["", "Yes.", "Two and two.\n#### 4"]
    assert found[2].source == "question.jsonl:3"


@pytest.mark.parametrize(
    ("name", "index", "right", "wrong"),
    [
        ("math500", 0, r"\boxed{2}", r"\boxed{3}"),
        ("math500", 1, r"so \boxed{0.5}", "2"),
        ("aime24", 0, r"\boxed{73}", r"\boxed{37}"),
        ("aime25", 0, "It is 70.", "It is 71."),
        ("gsm8k", 0, r"\boxed{4}", r"\boxed{5}"),
        ("spec-bench", 2, "That makes 4.", "That makes 5."),
    ],
)
def test_final_answers_are_checked(raw_dir, name, index, right, wrong):
    dataset = datasets.find(name, DataConfig(raw_dir=str(raw_dir)))
    example = list(dataset.examples("test"))[index]
    assert dataset.is_correct(example, right) is True
    assert dataset.is_correct(example, wrong) is False
    assert dataset.is_correct(example, example.response) is True


@pytest.mark.parametrize(("name", "index"), [("humaneval", 0), ("alpaca", 0), ("spec-bench", 1)])
def test_what_has_no_final_answer_is_not_checked(raw_dir, name, index):
    dataset = datasets.find(name, DataConfig(raw_dir=str(raw_dir)))
    example = list(dataset.examples("test"))[index]
    assert dataset.is_correct(example, "4") is None


@pytest.mark.parametrize("name", ["code", "chat"])
def test_answers_of_code_and_chat_are_graded_to_the_letter(name):
    (example,) = datasets.task_examples(name, limit=1)
    dataset = datasets.find(name, DataConfig())
    assert dataset.is_correct(example, f"{example.response}\n")
    assert not dataset.is_correct(example, example.response[:-1])
    assert not dataset.is_correct(example, example.response, finished=False)


def test_a_sample_is_from_all_over_and_in_order(tmp_path):
    rows = [{"question": f"{i}", "answer": f"#### {i}"} for i in range(100)]
    write(tmp_path / "gsm8k" / "test.jsonl", rows)

    def sample(limit):
        return [int(text.partition("\n")[0]) for text in first_prompts("gsm8k", tmp_path, limit)]

    few = sample(5)
    assert few == sorted(few)
    assert few != list(range(5))
    assert set(few) < set(sample(20))
    assert sample(None) == list(range(100))


def test_nothing_can_be_trained_on(raw_dir):
    dataset = datasets.find("gsm8k", DataConfig(raw_dir=str(raw_dir)))
    for split in ("train", "validation"):
        assert dataset.sample(split) == []
    with pytest.raises(errors.InputError, match="data set gsm8k: no examples in its split train"):
        encoding.open_corpus(dataset, "train", ByteTokenizer(), raw_dir / "stored")


def test_a_set_is_encoded_as_its_file_has_it(raw_dir):
    """A changed file is encoded again."""
    config, tokenizer = DataConfig(raw_dir=str(raw_dir)), ByteTokenizer()

    def read():
        dataset = datasets.find("mt-bench", config)
        corpus = encoding.open_corpus(dataset, "test", tokenizer, raw_dir / "stored")
        return sorted(corpus.document(index).tolist() for index in range(len(corpus)))

    examples = datasets.task_examples("mt-bench", raw_dir=str(raw_dir))
    documents = [part.tolist() for one in examples for part in encoding.encode(one, tokenizer)]
    assert read() == sorted(documents)
    write(raw_dir / "mt_bench" / "question.jsonl", TURNS[1:])
    assert len(read()) == 2


def failure(name, raw_dir):
    examples = functools.partial(datasets.task_examples, raw_dir=str(raw_dir))
    return support.failure(examples, name, kind=errors.InputError)


def test_a_row_of_another_file_is_named(raw_dir):
    path = raw_dir / "gsm8k" / "test.jsonl"
    write(path, [ROWS["gsm8k"][0], {"problem": "x", "answer": "y"}])
    assert failure("gsm8k", raw_dir) == (
        f"{path}:2: no 'question', only 'problem', 'answer'; expected the file of "
        f"{benchmarks.Gsm8k.raw_file.url}"
    )
    path = raw_dir / "mt_bench" / "question.jsonl"
    write(path, [{"turns": []}])
    assert failure("mt-bench", raw_dir) == f"{path}:1: expected questions as text, not []"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gsm8k", b"", "contains no rows"),
        ("gsm8k", b"{\n", "1: not JSON"),
        ("gsm8k", b"[1]\n", "1: expected a JSON object"),
        ("humaneval", b"plain", "damaged: Not a gzipped file"),
        ("humaneval", CUT_SHORT, "damaged: Compressed file ended"),
        ("mbpp", b"{}", "expected a list, not {}"),
        ("mbpp", b"[1]", "[0]: expected an object, not 1"),
        ("mbpp", b"\xff", "not JSON in UTF-8"),
        ("aime24", b"PAR1", "not a parquet file"),
    ],
)
def test_damaged_files_are_named(raw_dir, name, content, message):
    file = registry.load(registry.DATASETS[name]).raw_file
    path = raw_dir / file.folder / file.name
    path.write_bytes(content)
    line = failure(name, raw_dir)
    assert line.startswith(str(path))
    assert message in line


@pytest.fixture
def server(tmp_path):
    """Serves the files of a directory, and yields the URL."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "served"))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_missing_file_is_downloaded_once(tmp_path, server, capsys):
    write(tmp_path / "served" / "a.jsonl", [{"x": 1}])
    file = raw.RawFile("set", f"{server}/a.jsonl")
    path = raw.fetch(file, tmp_path / "raw")
    assert path == tmp_path / "raw" / "set" / "a.jsonl"
    assert [row for _, row in raw.rows(path)] == [{"x": 1}]
    assert capsys.readouterr().err == f"data: downloading {server}/a.jsonl\n"
    write(tmp_path / "served" / "a.jsonl", [{"x": 2}])
    raw.fetch(file, tmp_path / "raw")
    assert [row for _, row in raw.rows(path)] == [{"x": 1}]


def test_what_cannot_be_downloaded_says_where_to_put_it(tmp_path, server):
    file = raw.RawFile("set", f"{server}/a.jsonl")
    assert support.failure(raw.fetch, file, tmp_path, kind=errors.InputError) == (
        f"{tmp_path}/set/a.jsonl: missing: put a copy of {server}/a.jsonl there "
        "(downloading failed: File not found)"
    )
    assert not [path for path in (tmp_path / "set").iterdir() if path.name != ".lock"]
