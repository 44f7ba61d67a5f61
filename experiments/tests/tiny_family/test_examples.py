"""Generated examples stay what they were when the tiny family was trained."""

import hashlib
import itertools
import json
import sys

import pytest

from dflash.config import registry
from dflash.config.train_schema import DataConfig
from dflash.data import datasets as shipped
from experiments.tiny_family import write_examples
from experiments.tiny_family.datasets import DATASETS

# SHA-256 of the first 500 examples; code, chat and copying depend on the library of Python 3.11.
DIGESTS = {
    ("math", "train"): "dbadfbb0d7ebfd76",
    ("math", "validation"): "2a86d2d2f9d715e5",
    ("math", "test"): "1e22f9dc40452a73",
    ("arithmetic", "train"): "489eddd11f29f410",
    ("arithmetic", "validation"): "e1174d2b3a82a5e5",
    ("arithmetic", "test"): "8ed672df4086b71e",
}
library = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="made with Python 3.11")


def generated(name):
    return registry.load(DATASETS[name])(DataConfig())


@pytest.mark.parametrize(("name", "split"), DIGESTS)
def test_examples_are_those_of_the_first_training(name, split):
    digest = hashlib.sha256()
    for one in itertools.islice(generated(name).examples(split), 500):
        digest.update(json.dumps([one.task, one.source, list(one.messages)]).encode())
    assert digest.hexdigest()[:16] == DIGESTS[name, split]


@pytest.mark.parametrize(
    "name", ["math", pytest.param("code", marks=library), pytest.param("chat", marks=library)]
)
def test_the_package_has_the_first_held_out_examples(name):
    lines = (shipped.HELD_OUT / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    sample = generated(name).sample("test", len(lines))
    assert lines == [write_examples.line(example) for example in sample]
