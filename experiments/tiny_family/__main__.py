"""Runs a command of dflash with the generated data sets, and with sweeps of distillations.

python -m experiments.tiny_family train experiments/tiny_family/train/target.yml --workdir DIR
"""

import sys

from dflash.__main__ import main
from dflash.cli.commands import COMMANDS
from dflash.config import registry
from experiments.tiny_family.datasets import DATASETS

registry.DATASETS.update(DATASETS)
COMMANDS["train_tokenizer"] = (
    "experiments.tiny_family.train_tokenizer",
    "Train a tokenizer on data sets.",
)
registry.RUNS["distill"] = registry.Entry(
    "experiments.tiny_family.distill_sweep:DistillPoints", "dflash.config.distill_schema:DistillRun"
)

if __name__ == "__main__":
    sys.exit(main())
