"""A data set that the builder of tensorflow-datasets has written, read through a config."""

import dataclasses
import logging
import re
import sys

import numpy as np
import pytest

from dflash import errors
from dflash.config import loader, train_schema
from dflash.data import corpus, datasets, mixture
from dflash.data.example import SPLITS
from dflash.text.tokenizer import ByteTokenizer

CONFIG = "configs/train/qwen3_4b_dflash.yml"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    tfds = pytest.importorskip("tensorflow_datasets", reason="pip install tensorflow-datasets")
    logging.getLogger("absl").setLevel(logging.ERROR)
    text = tfds.features.Text

    class Chats(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        name = "chats"
        code_path = None

        def _info(self):
            turns = tfds.features.Sequence({"role": text(), "content": text()})
            features = {"question": text(), "answer": text(), "turns": turns}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, manager):
            return {"train": self._generate_examples(200), "dev": self._generate_examples(3)}

        def _generate_examples(self, count):
            for number in range(count):
                question, answer = f"What is {number} é?", f"It is {number}."
                turns = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
                yield number, {"question": question, "answer": answer, "turns": turns}

    directory = tmp_path_factory.mktemp("tfds")
    Chats(data_dir=str(directory), file_format="array_record").download_and_prepare()
    return directory


def data_config(stored, *overrides):
    keys = (
        f"data.tfds={{name: chats, data_dir: {stored}}}",
        "data.mixture={tfds: 1.0}",
        "data.files=[]",
        "data.held_out_percent=10",
        *(f"data.tfds.{override}" for override in overrides),
    )
    return loader.load(CONFIG, keys, train_schema.TrainRun).data


PAIR = "prompt=question", "response=answer"


@pytest.mark.parametrize("fields", [PAIR, ("messages=turns",)])
def test_rows_become_conversations(stored, fields):
    dataset = datasets.find("tfds", data_config(stored, *fields))
    found = {split: list(dataset.examples(split)) for split in SPLITS}
    assert sum(map(len, found.values())) == 200
    assert all(len(examples) > 5 for examples in found.values())
    one = found["train"][0]
    number = int(one.response.removeprefix("It is ").removesuffix("."))
    assert one.prompt == ({"role": "user", "content": f"What is {number} é?"},)
    assert one.place == f"chats/1.0.0/train[{number}]"


def test_splits_of_the_data_set_take_the_place_of_held_out_questions(stored):
    dataset = datasets.find("tfds", data_config(stored, *PAIR, "splits={validation: dev}"))
    found = {split: list(dataset.examples(split)) for split in SPLITS}
    assert len(found["validation"]) == 3
    assert len(found["train"]) + len(found["test"]) == 200
    assert len(found["test"]) > 5
    changed = {
        datasets.find("tfds", data_config(stored, *keys)).variant
        for keys in (PAIR, (*PAIR, "splits={validation: dev}"), ("messages=turns",))
    }
    assert len(changed) == 3


def test_a_run_trains_on_them_without_tensorflow(stored, tmp_path):
    config = data_config(stored, "messages=turns")
    config = dataclasses.replace(config, mixture={"tfds": 1.0}, data_dir=str(tmp_path), length=64)
    mixed = mixture.open_mixture(config, datasets.find_all(config), ByteTokenizer())
    row = mixed.read([(0, 0)])
    text = ByteTokenizer().decode(row["tokens"][row["loss_mask"] > 0].tolist())
    assert text.startswith("It is ")
    assert len(mixed.corpora[0].corpus) > 140
    assert np.all(row["tokens"] < corpus.SUPERVISED)
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("name=chats:2.0.0", *PAIR), "data.tfds.name=chats:2.0.0: "),
        (("name=chads", *PAIR), "data.tfds.name=chads: Dataset chads not found."),
        (("splits={train: dave}", *PAIR), "data.tfds.name=chats: Unknown split 'dave'."),
        (("prompt=query", "response=answer"),
         "data.tfds.prompt: chats has no field 'query', only answer, question, turns"),
        (("messages=answer",), "chats/1.0.0/train[0]: messages: expected a list, not \"It is 0.\""),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line_each(stored, overrides, message):
    dataset = datasets.find("tfds", data_config(stored, *overrides))
    with pytest.raises(errors.UserError, match=f"^{re.escape(message)}"):
        list(dataset.examples("train"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "expected either messages, or prompt and response: names of fields of the rows"),
        (("messages=a", "prompt=b"), "expected either messages, or prompt and response"),
        (("prompt=b",), "expected either messages, or prompt and response"),
        ((*PAIR, "name=null"), "data.tfds.name: required by the data set tfds of data.mixture"),
        ((*PAIR, "splits={valid: a}"), "data.tfds.splits.valid: unknown split"),
    ],
)
def test_configs_are_checked(tmp_path, overrides, message):
    with pytest.raises(errors.ConfigError, match=re.escape(message)):
        data_config(tmp_path, *overrides)


def test_a_missing_package_is_one_line(stored, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    dataset = datasets.find("tfds", data_config(stored, *PAIR))
    with pytest.raises(errors.InputError, match="needs tensorflow-datasets; pip install '"):
        list(dataset.examples("train"))
