"""Writes examples of a generated data set as JSONL, as data.files and answers.files read them.

    python -m experiments.tiny_family.write_examples math train 1000 > questions.jsonl
    for name in math code chat; do python -m experiments.tiny_family.write_examples $name test 240 \
        > dflash/assets/prompts/$name.jsonl; done    # with Python 3.11
"""

import json
import sys

from dflash import errors
from dflash.config import registry
from dflash.config.train_schema import DataConfig
from dflash.data.example import Example
from experiments.tiny_family.datasets import DATASETS


def line(example: Example) -> str:
    """Returns an example as one line of JSON."""
    if len(example.messages) == 2:
        fields = {"prompt": example.prompt[0]["content"], "response": example.response}
    else:
        fields = {"messages": example.messages}
    return json.dumps(fields, ensure_ascii=False)


def main(name: str, split: str, count: int) -> None:
    """Prints the first `count` examples of a sample of the split."""
    for example in registry.load(DATASETS[name])(DataConfig()).sample(split, count):
        print(line(example))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except errors.UserError as error:
        sys.exit(f"error: {error}")
