"""Every command that several processes can run, on some, one after the other in the same ones.

Usage: every_command.py DIRECTORY COUNT
DIRECTORY holds c.yml for decoding, b.yml for a benchmark, t.yml for training, config.yml for a
distillation. Each process writes what it says to process.I, and the first one's work directories
are decode, benchmark, train and distill.
"""

import functools
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from support import forked, tiny_distillation, xla_flags

os.environ["XLA_FLAGS"] = xla_flags.quick(devices=1)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from dflash import benchmark, decode, distill, train
from dflash.cli import processes
from dflash.cli import subcommand as cli
from dflash.distillation import stages  # noqa: F401  # before processes are forked
from dflash.measure import benchmark_run  # noqa: F401
from dflash.training import train_job  # noqa: F401

PATIENCE_S = 1500


def commands(directory: pathlib.Path, count: int) -> None:
    """Runs all of them in a process that has joined the others."""
    mesh = f"mesh.data={count}"

    def parse(module, config: str, *overrides: str, **places):
        return cli.parse(module.SUBCOMMAND, directory / config, mesh, *overrides, **places)

    # A shard is a run of all processes too, and the last one, here the only one, sums up.
    where = {"workdir": directory / "decode", "shard": "0/1", "stream": False}
    decode._decode(parse(decode, "c.yml", **where))
    benchmark._benchmark(parse(benchmark, "b.yml", workdir=directory / "benchmark"))
    train._train(parse(train, "t.yml", workdir=directory / "train"))
    distill._distill(
        parse(
            distill, "config.yml", *tiny_distillation.ROWS_FOR_FOUR, workdir=directory / "distill"
        )
    )


def work(directory: pathlib.Path, given: tuple[str, int, int]) -> int:
    return cli.status_of(
        lambda: processes.run(given, lambda group: commands(directory, given[1]) or 0)
    )


def main() -> None:
    directory, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    # A place of its own: of shared programs, all processes must find the same ones there.
    jax.config.update("jax_compilation_cache_dir", str(directory / "programs"))
    forked.share_programs()
    with forked.Forked(functools.partial(work, directory), count, directory) as all_:
        all_.wait(PATIENCE_S)
        print(json.dumps([one and (one.status, one.lines) for one in all_.ends]))


if __name__ == "__main__":
    main()
