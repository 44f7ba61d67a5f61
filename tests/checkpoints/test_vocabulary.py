"""Tokenizers of one size that are not the same."""

import json

import pytest
from support import failure

from dflash.checkpoints import vocabulary


@pytest.fixture
def write(tmp_path):
    """Writes a checkpoint's tokenizer.json and returns the checkpoint's directory."""

    def write_one(name, vocab, added=()):
        directory = tmp_path / name
        directory.mkdir()
        added = [{"id": token, "content": text} for token, text in added]
        content = {"model": {"vocab": vocab}, "added_tokens": added}
        (directory / "tokenizer.json").write_text(json.dumps(content))
        return directory

    return write_one


def test_the_same_tokens_pass(write):
    table, pieces = {"a": 0, "b": 1}, [["a", -1.0], ["b", -2.0]]
    target = write("target", table, [(2, "<end>")])
    vocabulary.check_same(target, target)
    vocabulary.check_same(target, write("table", table, [(2, "<end>")]))
    vocabulary.check_same(target, write("pieces", pieces))
    vocabulary.check_same(target, write("more", table, [(2, "<end>"), (3, "<tool>")]))


def test_a_checkpoint_without_a_tokenizer_passes(write, tmp_path):
    vocabulary.check_same(write("target", {"a": 0}), tmp_path)
    vocabulary.check_same(tmp_path, write("drafter", {"a": 0}))


@pytest.mark.parametrize(
    ("vocab", "added", "message"),
    [
        ({"b": 0, "a": 1}, [], "token 0 is 'b', in the target's 'a'"),
        ({"a": 0, "b": 1}, [(2, "<pad>")], "token 2 is '<pad>', in the target's '<end>'"),
    ],
)
def test_another_token_is_named_in_one_line(write, vocab, added, message):
    target = write("target", {"a": 0, "b": 1}, [(2, "<end>")])
    assert message in failure(vocabulary.check_same, target, write("drafter", vocab, added))


@pytest.mark.parametrize(
    "content",
    [
        {"model": [1]},
        {"model": {"vocab": {"a": "zero"}}},
        {"model": {"vocab": [1, 2]}},
        {"added_tokens": 7},
        {"added_tokens": [{"id": 1}]},
    ],
)
def test_a_vocabulary_of_another_form_is_one_line(write, content):
    drafter = write("drafter", {})
    (drafter / "tokenizer.json").write_text(json.dumps(content))
    said = failure(vocabulary.check_same, write("target", {"a": 0}), drafter)
    assert said == f"{drafter / 'tokenizer.json'}: not a tokenizer's vocabulary"
