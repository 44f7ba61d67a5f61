"""Runs a command of dflash with the generated data sets, in place of the shipped ones.

python -m experiments.tiny_family train experiments/tiny_family/train/target.yml --workdir DIR
"""

import sys

from dflash.__main__ import main
from dflash.config import registry
from experiments.tiny_family.datasets import DATASETS

registry.DATASETS.update(DATASETS)

if __name__ == "__main__":
    sys.exit(main())
