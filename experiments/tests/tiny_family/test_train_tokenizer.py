import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import examples

from dflash import errors
from dflash.text.tokenizer import IncrementalDecoder
from dflash.text.tokenizer_loading import load_tokenizer
from experiments.tiny_family import train_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "x = 12?\n"},
    {"role": "assistant", "content": "    return 12"},
    {"role": "user", "content": "é▁ \t"},
]
INDENTED = st.lists(
    st.tuples(st.integers(0, 30), st.text(max_size=8), st.sampled_from(["\n", "\r\n", "\n\n"]))
).map(lambda lines: "".join(" " * indent + text + end for indent, text, end in lines))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    directory = tmp_path_factory.mktemp("words") / "tokenizer"
    files = [examples.PROMPTS / f"{name}.jsonl" for name in ("math", "code")]
    train_tokenizer.train_tokenizer(directory, files=files, vocab_size=600)
    return load_tokenizer(directory)


@settings(max_examples=300)
@given(st.one_of(st.text(), INDENTED))
@example("def f(x):\n    if x:\n        return 1000\n\n\n\tpass  \n")
@example(" ")
@example("▁ ▁▁ a▁")
@example("\x00\n \ufeff\u2028\U0001f600e\u0301")
@example("<unk> ⁇ <0x41>")
@example("\n                                 deep")
@example("<|user|>a<|end|>")
def test_any_text_is_spelled_back(words, text):
    ids = words.encode(text)
    assert words.decode(ids) == text
    assert IncrementalDecoder(words).push(ids) == text or "\ufffd" in text
    assert all(0 <= token < words.vocab_size for token in ids)


def test_pieces(words):
    model = words._model
    expected = ["<unk>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    assert [model.id_to_piece(i) for i in range(7)] == [*expected, "<|mask|>"]
    assert model.eos_id() == 2
    assert words.vocab_size == 600
    digits = words.encode("2024")
    assert len(digits) in (4, 5)
    assert len(words.encode("\n        ")) == 1


def test_chat(words):
    ids = words.encode_chat(CONVERSATION)
    names = [words._model.id_to_piece(i) for i in ids if words._is_control(i)]
    assert names == [
        "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>", "<|user|>",
        "<|end|>", "<|assistant|>",
    ]  # fmt: skip
    assert words.decode(ids) == "".join(message["content"] for message in CONVERSATION)
    with pytest.raises(errors.InputError, match="unknown role tool"):
        words.encode_chat([{"role": "tool", "content": "x"}])


def run(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        train_tokenizer.main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_command(tmp_path, capsys):
    destination = tmp_path / "words"
    arguments = f"--files={examples.PROMPTS / 'math.jsonl'}", "--vocab_size=500", "--megabytes=0.02"
    status, out, err = run(capsys, destination, *arguments)
    assert (status, err) == (0, "")
    assert out.startswith(f"{destination}: 500 pieces from 0.0 M characters of jsonl, in ")
    assert sorted(path.name for path in destination.iterdir()) == [
        "chat_template.jinja", "tokenizer.model", "tokenizer_config.json",
    ]  # fmt: skip
    assert load_tokenizer(destination).vocab_size == 500
    status, _, err = run(capsys, destination, *arguments)
    assert status == 2
    assert err.startswith(f"error: {destination}: already exists")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "expected DESTINATION, not 0 arguments"),
        (["x", "--vocab_size=2"], "flag --vocab_size=2: 2 is not integer >= 300"),
        (["x", "--datasets=maths"], "unknown data set 'maths'; did you mean 'math'?"),
        (["x"], "no text to train on: name data sets or files"),
        (["x", "--files=none.jsonl"], "none.jsonl: cannot be read"),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert len(err.splitlines()) == 1
