"""Texts from clients are encoded no further than needed, and errors keep the server's paths."""

import pytest

from dflash import errors
from dflash.serving.encoding import encode_within, input_error
from dflash.serving.validation import RequestError


class Encoder:
    """Encodes each run of a character, up to `longest` of it, as one token; counts characters."""

    def __init__(self, longest: int = 1):
        self.longest, self.characters = longest, 0

    def __call__(self, text):
        self.characters += len(text)
        return text[:: self.longest]


def test_a_text_that_is_too_long_is_not_encoded_in_full():
    encode = Encoder()
    with pytest.raises(RequestError) as caught:
        encode_within("a" * 10**6, encode, "prompt", 1000)
    assert encode.characters <= 10_000
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("length", [1, 7999, 8001, 100_000])
def test_texts_that_may_fit_are_encoded(length):
    encode = Encoder(longest=128)
    assert len(encode_within(" " * length, encode, "prompt", 1000)) == -(-length // 128)
    assert encode.characters <= 2 * length, "the beginning is encoded twice at most"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/data/m/x/tokenizer.json: damaged", "tokenizer.json: damaged"),
        ("runs/export: no tokenizer (a or b)", "export: no tokenizer (a or b)"),
        ("runs/export/chat_template.jinja: fails", "export/chat_template.jinja: fails"),
        ("roles must alternate user/assistant/user", "roles must alternate user/assistant/user"),
    ],
)
def test_errors_keep_the_paths_of_the_server(message, shown):
    error = input_error(errors.InputError(message), "messages", "runs/export")
    assert (error.message, error.param) == (shown, "messages")
