"""Studies what limits trees: python -m experiments.acceptance CONFIG --workdir DIR.

CONFIG is one of `dflash benchmark`, followed by key=value. Writes study.csv and study.png.
"""

import argparse
import pathlib
import sys

from dflash import errors
from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure import results
from experiments.acceptance.trees import COUNTS, trees


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.acceptance")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, help="of candidates")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    args = parser.parse_intermixed_args()
    config = loader.load(args.config, args.overrides, BenchmarkRun)
    args.workdir.mkdir(parents=True, exist_ok=True)
    for step in trees(config, args.counts):
        print(f"{step.done:4.0%}  {step.what}", file=sys.stderr)
    (args.workdir / "study.csv").write_text(results.table_csv(step.result.rows), encoding="utf-8")
    (args.workdir / "study.png").write_bytes(step.result.png())
    print("\n".join(step.result.text()))


if __name__ == "__main__":
    try:
        main()
    except errors.UserError as error:
        sys.exit(f"error: {error}")
