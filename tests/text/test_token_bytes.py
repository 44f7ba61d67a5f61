import json

import numpy as np
import pytest
from support.trained_tokenizers import (
    failure,
    train_byte_fallback,
    train_byte_level,
    train_metaspace,
    train_sentencepiece,
)

from dflash.text import tokenizer as tokenization
from dflash.text.tokenizer_loading import load_tokenizer

SPACED = {"remove_extra_whitespaces": True, "add_dummy_prefix": True}
TRAINERS = {
    "byte level": train_byte_level,
    "byte fallback": train_byte_fallback,
    "metaspace": train_metaspace,
    "metaspace, no prefix": lambda where: train_metaspace(where, "never"),
    "sentencepiece": train_sentencepiece,
    "sentencepiece, prefixed": lambda where: train_sentencepiece(where, **SPACED),
    "bytes": None,
}


@pytest.fixture(scope="module", params=TRAINERS)
def tokenizer(request, tmp_path_factory):
    train = TRAINERS[request.param]
    if train is None:
        return tokenization.ByteTokenizer()
    directory = tmp_path_factory.mktemp("tokenizer")
    train(directory)
    return load_tokenizer(directory)


def test_bytes_are_what_decode_writes(tokenizer):
    """Random tokens include special ones, and their bytes are often not UTF-8."""
    found = tokenizer.token_bytes()
    assert len(found.tokens) == tokenizer.vocab_size
    rng = np.random.default_rng(0)
    texts = 0
    for _ in range(1000):
        ids = rng.integers(0, tokenizer.vocab_size, rng.integers(1, 7)).tolist()
        written = b"".join(found.tokens[token] or b"" for token in ids)
        try:
            text = written.decode()
        except UnicodeDecodeError:
            continue
        if any(found.tokens[token] is None for token in ids):
            continue
        if found.drops_space and b" " in found.tokens[ids[0]]:
            continue
        assert tokenizer.decode(ids) == text, ids
        texts += 1
    assert texts > 30


def test_tokens_without_text(tokenizer):
    found = tokenizer.token_bytes()
    for token, written in enumerate(found.tokens):
        assert written != b""
        if written is None:
            assert tokenizer.decode([token]).strip(" \u2047").replace("<unk>", "") == ""


@pytest.mark.parametrize("name", ["byte fallback", "metaspace", "sentencepiece, prefixed"])
def test_a_first_space_is_dropped(name, tmp_path):
    TRAINERS[name](tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    found = tokenizer.token_bytes()
    assert found.drops_space
    (*_, space) = (i for i, written in enumerate(found.tokens) if written == b" ")
    letter = found.tokens.index(b"e")
    assert tokenizer.decode([space, letter]) == "e"
    assert tokenizer.decode([letter, space, letter]) == "e e"


def test_unknown_decoders_are_refused(tmp_path):
    train_byte_level(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    file.write_text(json.dumps(content), encoding="utf-8")
    message = failure(load_tokenizer(tmp_path).token_bytes)
    assert "structured output needs the bytes of each token" in message
    assert "bytes of each token" in failure(tokenization.NoTokenizer(tmp_path).token_bytes)
