"""Tokenizer for the tests of data."""

import shutil

import pytest
from support import examples

from dflash.text import tokenizer_loading

# The shipped family sees single turns.
TURNS = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


@pytest.fixture(scope="session")
def words_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("words")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(examples.PROMPTS.parent / "tiny_target" / name, directory)
    (directory / "chat_template.jinja").write_text(TURNS)
    return directory


@pytest.fixture(scope="session")
def words(words_directory):
    return tokenizer_loading.load_tokenizer(words_directory)
