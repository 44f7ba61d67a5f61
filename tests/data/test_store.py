import dataclasses
import json
import re
import subprocess
import sys
import textwrap

import pytest
from support import examples, write_lines
from support.trained_tokenizers import failure

from dflash import errors
from dflash.config.train_schema import DataConfig
from dflash.data import datasets, encoding, files
from dflash.data.corpus import SUPERVISED
from dflash.text.tokenizer import ByteTokenizer, NoTokenizer
from dflash.training import train_job


def open_train(dataset, directory):
    return encoding.open_corpus(dataset, "train", ByteTokenizer(), directory)


def test_jsonl_follows_its_files(tmp_path):
    path = tmp_path / "a.jsonl"
    config = DataConfig(files=(str(path),))

    def read():
        corpus = open_train(datasets.find("jsonl", config), tmp_path / "data")
        (document,) = map(corpus.document, range(len(corpus)))
        return (document & ~SUPERVISED).tolist()

    write_lines(path, [{"prompt": "é\n  x", "response": "▁"}])
    assert bytes(read()).decode() == "é\n  x\n▁"
    write_lines(path, [{"prompt_ids": [1, 70000], "output_ids": [3]}])
    assert read() == [1, 70000, 3]


def test_a_jsonl_set_depends_on_its_files_and_on_what_is_held_out(tmp_path):
    path = tmp_path / "a.jsonl"
    write_lines(path, [{"prompt": "a", "response": "b"}])

    def variant(**options):
        return datasets.find("jsonl", DataConfig(files=(str(path),), **options)).variant

    first = variant()
    assert variant() == first != variant(held_out_percent=2.0)
    write_lines(path, [{"prompt": "a", "response": "c"}])
    assert variant() != first


def test_bad_lines_leave_nothing_behind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": 3, "response": "b"}\n')
    dataset = datasets.find("jsonl", DataConfig(files=(str(path),)))
    for _ in range(2):
        message = f"{path}:2: prompt: expected a string, not 3"
        assert failure(open_train, dataset, tmp_path / "data") == message
        assert list((tmp_path / "data").glob("encoded/*")) == []


def test_an_empty_split_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n')
    dataset = datasets.find("jsonl", DataConfig(files=(str(path),), held_out_percent=0.0))
    with pytest.raises(errors.InputError, match="data set jsonl: no examples in its split test"):
        encoding.open_corpus(dataset, "test", ByteTokenizer(), tmp_path / "data")


def test_two_processes_encode_the_data_once_and_need_no_tensorflow(tmp_path):
    (file,) = examples.config(tmp_path, 200).files
    code = f"""
        import pathlib, sys
        from dflash.config.train_schema import DataConfig
        from dflash.data import datasets, encoding
        from dflash.text.tokenizer import ByteTokenizer
        config = DataConfig(files=({file!r},), held_out_percent=0.0)
        dataset = datasets.find("jsonl", config)
        directory = pathlib.Path({str(tmp_path)!r})
        print(len(encoding.open_corpus(dataset, "train", ByteTokenizer(), directory)))
        print("tensorflow" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in running]
    assert [out.split() for out, _ in outputs] == [["200", "False"]] * 2, outputs
    (said,) = [err.splitlines() for _, err in outputs if err]
    assert said[0].startswith("data: encoding jsonl/train, 200 examples, once, in ")
    assert re.fullmatch(r"data: encoded jsonl/train, 200 examples, \d+\.\d MB", said[1])
    assert len(said) == 2


def mixed_prompts(config, tokenizer, directory, limit=12):
    return train_job.mixed_prompts(datasets.find_all(config), tokenizer, directory, limit=limit)


def test_mixed_prompts_are_shared_out(tmp_path):
    config = DataConfig(mixture={"math": 3.0, "chat": 1.0, "code": 0.0})
    tokenizer = ByteTokenizer()

    def mixed(limit):
        sets = datasets.find_all(config)
        return train_job.mixed_prompts(sets, tokenizer, tmp_path, "test", limit=limit)

    found = mixed(5)
    assert {name: len(prompts) for name, prompts in found.items()} == {"math": 3, "chat": 2}
    asked = [example.prompt for example in datasets.task_examples("math", 3)]
    assert found["math"] == [tuple(tokenizer.encode_chat(messages)) for messages in asked]
    assert {len(some) for some in mixed(1).values()} == {0, 1}


def test_prompts_of_a_decode_run_are_held_out_as_they_are(tmp_path, monkeypatch):
    """The token ids of outputs.jsonl need no tokenizer."""
    lines = [{"prompt_ids": [7, index], "output_ids": [1]} for index in range(40)]
    path = write_lines(tmp_path / "outputs.jsonl", lines)
    config = DataConfig(files=(path,), held_out_percent=20.0)
    kept = list(files.examples([path], "validation", 20.0))
    assert kept
    tokenizer, data = NoTokenizer(tmp_path), tmp_path / "data"
    found = mixed_prompts(config, tokenizer, data, 40)
    assert sorted(found["jsonl"]) == sorted(example.prompt_ids for example in kept)
    # The next start does not go through the files again.
    monkeypatch.setattr(files, "examples", None)
    assert mixed_prompts(config, tokenizer, data, 40) == found
    monkeypatch.undo()
    few = dataclasses.replace(config, held_out_percent=0.0)
    for use in (
        lambda: mixed_prompts(few, tokenizer, data),
        lambda: encoding.open_corpus(datasets.find("jsonl", few), "validation", tokenizer, data),
    ):
        assert failure(use) == (
            "data set jsonl: no examples in its split validation: "
            "raise data.held_out_percent=0, or give more questions"
        )


def test_prompts_that_the_template_rejects_are_named(tmp_path):
    message = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "b"}
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps({"messages": [message, answer]}))
    config = DataConfig(files=(str(path),), held_out_percent=0.0)
    sets = datasets.find_all(config)
    said = failure(train_job.mixed_prompts, sets, NoTokenizer(tmp_path), tmp_path, "train")
    assert said.startswith(f"{path}:2: {tmp_path}: no tokenizer")
