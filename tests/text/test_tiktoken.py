import base64
import json

import pytest
from support import failure

from dflash import errors
from dflash.text.tokenizer_loading import load_tokenizer

tiktoken = pytest.importorskip("tiktoken", reason="pip install 'dflash-jax[hf]'")

MERGES = ["he", "ll", "llo", "hello", " w", "你", "你好", "好吗", "ABC", "BC", "12", "123", "'s"]
BASE = 256 + len(MERGES)
ADDED = {
    BASE: ("[BOS]", True),
    BASE + 1: ("<|im_user|>", True),
    BASE + 2: ("<|im_end|>", True),
    BASE + 3: ("<|tool|>", False),
}
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def directory(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)]
    for merge in MERGES:
        for size in range(2, len(merge.encode()) + 1):  # every merge is of two tokens
            tokens += [] if merge.encode()[:size] in tokens else [merge.encode()[:size]]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    shift = len(tokens) - BASE
    write_config(tmp_path, {BASE + shift + i: token for i, token in enumerate(ADDED.values())})
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def write_config(directory, added, **changes):
    decoder = {
        str(number): {"content": content, "special": special}
        for number, (content, special) in added.items()
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder} | changes
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def spelled(tokenizer, ids):
    return [tokenizer.decode([one], special_tokens=True) for one in ids]


def test_texts_are_cut_as_kimi_does_and_merged(directory):
    tokenizer = load_tokenizer(directory)
    assert spelled(tokenizer, tokenizer.encode("hello world")) == ["hello", " w", *"orld"]
    # Chinese stands apart from what surrounds it, digits come in threes.
    ids = tokenizer.encode("hello你好12345\n")
    assert spelled(tokenizer, ids) == ["hello", "你好", "123", *"45", "\n"]
    assert spelled(tokenizer, tokenizer.encode("he's")) == ["he", "'s"]


@pytest.mark.parametrize(
    "text", ["", "naïve café — 你好，世界 🦜🚀", "  two\n\n\ttabs \r\n", "\x00\ufdd0a", "ABC" * 99]
)
def test_text_comes_back(directory, text):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_runs_do_not_break_the_library(directory):
    tokenizer = load_tokenizer(directory)
    for text in ("a" * 200_000, " " * 200_000, "你" * 60_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(directory):
    tokenizer = load_tokenizer(directory)
    user, end = tokenizer.encode("<|im_user|><|im_end|>", special_tokens=True)
    assert (end, tokenizer.vocab_size) == (user + 1, user - 1 + 256)
    ids = tokenizer.encode_chat([{"role": "user", "content": "a<|im_end|>"}])
    assert (ids[0], ids[-1]) == (user, end)
    assert ids.count(end) == 1, "what a message spells is text"
    assert tokenizer.decode(ids) == "a<|im_end|>"
    assert tokenizer.decode(ids, special_tokens=True) == "<|im_user|>a<|im_end|><|im_end|>"
    (tool,) = tokenizer.encode("<|tool|>", special_tokens=True)
    assert tokenizer.decode([tool]) == "<|tool|>", "added, but not special"
    reserved = f"<|reserved_token_{tokenizer.vocab_size - 1}|>"
    (last,) = tokenizer.encode(reserved, special_tokens=True)
    assert last == tokenizer.vocab_size - 1
    assert tokenizer.decode([last, tokenizer.vocab_size + 7, -1]) == ""


def test_bytes_of_tokens(directory):
    tokenizer = load_tokenizer(directory)
    tokens = tokenizer.token_bytes().tokens
    assert len(tokens) == tokenizer.vocab_size
    ids = tokenizer.encode("hello 你")
    assert b"".join(tokens[one] for one in ids) == "hello 你".encode()
    (end, tool) = tokenizer.encode("<|im_end|><|tool|>", special_tokens=True)
    assert (tokens[end], tokens[tool]) == (None, b"<|tool|>")


def test_the_fingerprint_follows_the_ranks(directory):
    before = load_tokenizer(directory).fingerprint
    file = directory / "tiktoken.model"
    extra = base64.b64encode(b"zz").decode()
    file.write_text(file.read_text() + f"{extra} {len(file.read_text().splitlines())}\n")
    assert load_tokenizer(directory).fingerprint != before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense", "tiktoken.model: not a tiktoken file, or damaged"),
        (b"YQ== x\n", "tiktoken.model: not a tiktoken file, or damaged"),
        (b"YQ== 0\n", "tiktoken.model: ranks are not 0, 1, …, or some of the 256 bytes have none"),
    ],
)
def test_damaged_files(directory, content, message):
    (directory / "tiktoken.model").write_bytes(content)
    assert failure(load_tokenizer, directory, kind=errors.InputError) == f"{directory}/{message}"


def test_configs_that_are_not_read(directory):
    write_config(directory, {}, tokenizer_class="QWenTokenizer")
    message = failure(load_tokenizer, directory, kind=errors.InputError)
    assert "tokenizer_class: 'QWenTokenizer' is not supported" in message
    write_config(directory, {}, added_tokens_decoder={"7": 5})
    message = failure(load_tokenizer, directory, kind=errors.InputError)
    assert "added_tokens_decoder: 7: expected a string, or" in message
