import itertools
import shutil

import numpy as np
import pytest
from support import examples, write_lines
from support.trained_tokenizers import failure, train_sentencepiece

from dflash import errors
from dflash.config.train_schema import DataConfig
from dflash.data import corpus, datasets, encoding
from dflash.data.example import Example
from dflash.text import tokenizer, tokenizer_loading

USER, BOT = "user", "assistant"


def make(*turns) -> Example:
    return Example("t", "s", tuple({"role": role, "content": text} for role, text in turns))


def parts(words, document):
    """Splits a document into runs of (text with control pieces, supervised)."""
    marks = document >= corpus.SUPERVISED
    ids = (document & ~corpus.SUPERVISED).tolist()
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(ids)]

    def spell(some):
        return "".join(
            words._model.id_to_piece(i) if words._is_control(i) else words.decode([i]) for i in some
        )

    return [(spell(ids[start:end]), bool(marks[start])) for start, end in itertools.pairwise(edges)]


def test_only_answers_and_their_ends_are_learned(words):
    (document,) = encoding.encode(
        make(("system", "Brief."), (USER, "a?"), (BOT, "  b\n"), (USER, "c?"), (BOT, "d")), words
    )
    assert parts(words, document) == [
        ("<|system|>Brief.<|end|><|user|>a?<|end|><|assistant|>", False),
        ("  b\n<|end|>", True),
        ("<|user|>c?<|end|><|assistant|>", False),
        ("d<|end|>", True),
    ]


def test_the_question_is_encoded_as_for_decoding(words):
    for example in datasets.task_examples("math", limit=20):
        (document,) = encoding.encode(example, words)
        marks = document >= corpus.SUPERVISED
        ids = document & ~corpus.SUPERVISED
        assert ids[~marks].tolist() == words.encode_chat(example.prompt)
        assert words.decode(ids[marks].tolist()) == example.response
        assert ids[-1] == 2


def test_ids_are_taken_as_they_are(words):
    example = Example("t", "s", prompt_ids=(5, 6), output_ids=(7, 2))
    (document,) = encoding.encode(example, words)
    assert (document & ~corpus.SUPERVISED).tolist() == [5, 6, 7, 2]
    assert (document >= corpus.SUPERVISED).tolist() == [False, False, True, True]


def test_answers_that_follow_text_begin_without_a_space_of_their_own(tmp_path):
    """Decoding adds no space after a question that ends in text instead of a special token."""
    train_sentencepiece(tmp_path, add_dummy_prefix=True)
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    opened = "{% if add_generation_prompt %}assistant:{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template + opened)
    words = tokenizer_loading.load_tokenizer(tmp_path)
    (document,) = encoding.encode(make((USER, "Hello"), (BOT, "Hello"), (USER, "H")), words)
    ids = (document & ~corpus.SUPERVISED).tolist()
    assert words.decode(ids) == "user:Helloassistant:Hello"


def test_a_corpus_on_disk(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(encoding, "_FIRST_REPORT_SECONDS", 0.0)
    dataset = datasets.find("jsonl", examples.config(tmp_path, 30))
    opened = encoding.open_corpus(dataset, "train", words, tmp_path)
    assert len(opened) == 30
    expected = sorted(
        document.tolist()
        for example in dataset.examples("train")
        for document in encoding.encode(example, words)
    )
    assert sorted(opened.document(i).tolist() for i in range(30)) == expected
    largest = max(token & 0x7FFFFFFF for document in expected for token in document)
    assert opened.max_id == largest < 4096
    printed = capsys.readouterr().err
    assert "encoding jsonl/train, 30 examples" in printed
    assert "encoding jsonl/train: 1 of 30 examples, about 0.0 min left" in printed
    again = encoding.open_corpus(dataset, "train", words, tmp_path)
    assert "encoding" not in capsys.readouterr().err
    assert again.fingerprint == opened.fingerprint
    assert [again.document(i).tolist() for i in range(30)] == [
        opened.document(i).tolist() for i in range(30)
    ]
    other = encoding.open_corpus(dataset, "train", tokenizer.ByteTokenizer(), tmp_path)
    assert other.fingerprint != opened.fingerprint


def test_examples_keep_the_order_of_earlier_versions():
    """Rows depend on it, and with them runs in progress."""
    # As tensorflow-datasets 4.9.10 stored them.
    assert encoding.shuffled_order("train", 8).tolist() == [6, 5, 4, 0, 3, 1, 7, 2]
    assert encoding.shuffled_order("test", 8).tolist() == [6, 1, 4, 3, 2, 7, 5, 0]


def open_small(directory):
    dataset = datasets.find("jsonl", examples.config(directory, 5))
    return encoding.open_corpus(dataset, "train", tokenizer.ByteTokenizer(), directory)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    open_small(directory)
    return directory


def flip(file, place=-1):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def damaged_copy(stored, tmp_path, name, damage):
    """Returns a copy of the data directory, and the directory of the corpus in it."""
    shutil.copytree(stored, tmp_path / "data")
    (path,) = (tmp_path / "data" / "encoded").iterdir()
    damage(path / name)
    return tmp_path / "data", path


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokens.bin", lambda file: file.write_bytes(file.read_bytes()[:-4])),
        ("tokens.bin", lambda file: file.unlink()),
        ("offsets.npy", lambda file: flip(file, -8)),
        ("learned.npy", flip),
        ("crc32.npy", lambda file: file.write_bytes(b"")),
        ("facts.json", lambda file: file.write_text("{")),
        ("facts.json", lambda file: file.write_text("[]")),
        ("facts.json", lambda file: file.write_text('{"max_id": 5}')),
    ],
)
def test_damage_to_a_stored_corpus_is_found_when_it_is_opened(stored, tmp_path, name, damage):
    data, path = damaged_copy(stored, tmp_path, name, damage)
    assert failure(open_small, data) == (
        f"{path / name}: damaged: delete {path} to encode it again"
    )


def test_damage_to_a_document_is_found_when_it_is_read(stored, tmp_path):
    data, path = damaged_copy(stored, tmp_path, "tokens.bin", flip)
    opened = open_small(data)
    assert len(opened.document(0))
    assert failure(opened.document, len(opened) - 1) == (
        f"{path / 'tokens.bin'}: damaged: delete {path} to encode it again"
    )


def test_a_corpus_of_an_earlier_version_is_named_and_not_read(stored, tmp_path, capsys):
    data, path = damaged_copy(stored, tmp_path, "facts.json", lambda file: None)
    old = path.rename(path.with_name(f"{path.name.rpartition('-')[0]}-2"))
    open_small(data)
    assert f"data: {old} is from an earlier version; delete it" in capsys.readouterr().err
    assert path.exists()


def test_vocabularies_must_fit(words):
    encoding.check_vocabulary(words, 4096)
    assert failure(encoding.check_vocabulary, words, 4095, kind=errors.ConfigError) == (
        "the tokenizer has 4096 tokens, but the model's vocab_size is 4095: give the model at "
        "least as many"
    )


def write_conversations(directory, words_directory, template, *conversations):
    """Writes a tokenizer with a template, and conversations; returns both as objects."""
    for path in words_directory.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "chat_template.jinja").write_text(template)
    lines = (
        {"messages": [{"role": role, "content": text} for role, text in turns]}
        for turns in conversations
    )
    path = write_lines(directory / "a.jsonl", lines)
    dataset = datasets.find("jsonl", DataConfig(files=(path,), held_out_percent=0.0))
    return dataset, tokenizer_loading.load_tokenizer(directory)


def test_conversations_that_the_template_rejects_are_named(words_directory, tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system.') }}"
        "{% endif %}{{ m.content }}<|end|>{% endfor %}"
    )
    good, bad = [(USER, "a"), (BOT, "b")], [("system", "s"), (USER, "a"), (BOT, "b")]
    dataset, words = write_conversations(tmp_path, words_directory, template, good, bad, good, bad)
    with pytest.raises(errors.InputError) as caught:
        encoding.open_corpus(dataset, "train", words, tmp_path / "d")
    reason = f"{tmp_path / 'chat_template.jinja'}: chat template fails: No system."
    places = [f"{tmp_path / 'a.jsonl'}:{line}" for line in (2, 4)]
    assert str(caught.value) == "\n".join(f"{place}: {reason}" for place in places)
    assert not list((tmp_path / "d" / "encoded").iterdir())


def test_a_template_without_an_end_token_is_named(words_directory, tmp_path, capsys):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns = [(USER, "a"), (BOT, "b")]
    dataset, words = write_conversations(tmp_path, words_directory, template, turns)
    encoding.open_corpus(dataset, "train", words, tmp_path / "d")
    assert capsys.readouterr().err.count(
        "data: jsonl/train: the chat template ends answers without a special token, so the model "
        "does not learn where they end\n"
    ) == 1  # fmt: skip
