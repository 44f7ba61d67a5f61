"""Small tokenizer for the tests of data."""

import pytest

from dflash.data import datasets, tokenizer_training
from dflash.text import tokenizer_loading


@pytest.fixture(scope="session")
def sentences():
    examples = [*datasets.task_examples("math"), *datasets.task_examples("code", limit=60)]
    return [message["content"] for example in examples for message in example.messages]


@pytest.fixture(scope="session")
def model_bytes(sentences):
    return tokenizer_training.train(sentences, vocab_size=600)


@pytest.fixture(scope="session")
def words_directory(model_bytes, tmp_path_factory):
    directory = tmp_path_factory.mktemp("words") / "tokenizer"
    tokenizer_training.write(model_bytes, directory)
    return directory


@pytest.fixture(scope="session")
def words(words_directory):
    return tokenizer_loading.load_tokenizer(words_directory)
