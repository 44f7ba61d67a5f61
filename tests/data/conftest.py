"""Tokenizer for the tests of data."""

import shutil

import pytest
from support import examples

from dflash.text import tokenizer_loading


@pytest.fixture(scope="session")
def words_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("words")
    for name in ("tokenizer.model", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(examples.PROMPTS.parent / "tiny_target" / name, directory)
    return directory


@pytest.fixture(scope="session")
def words(words_directory):
    return tokenizer_loading.load_tokenizer(words_directory)
