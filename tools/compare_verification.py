"""Compares how many drafts two rules accept when sampling: p/q rejection and block verification.

    python tools/compare_verification.py configs/benchmark/tiny_trees.yml --strategy=chain \
        decode.temperature=1 prompts_per_task=64

Decodes the first turns of a benchmark's prompts by rejection. For the drafts of every cycle it
computes the expected number of tokens that each rule commits, over the noise of acceptance, which
is far less uncertain than counts of two runs whose outputs differ. Prints for each task the mean of
both (τ), their ratio, and the ratio's standard error over prompts.
"""

import argparse
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.inference.cycle import cycle, verify
from dflash.inference.engine import Engine
from dflash.inference.pages import Slot
from dflash.inference.request import Request
from dflash.measure import bench as benches
from dflash.measure.bench import Bench

_HEADS = "task", "cycles", "rejection", "block", "ratio", "error"


def main() -> None:
    """Prints a line per task."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="config of a benchmark")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument(
        "--strategy", required=True, help="strategy of the config, which drafts chains"
    )
    args = parser.parse_intermixed_args()
    overrides = [*args.overrides, "decode.verify=rejection"]
    config = loader.load(args.config, overrides, BenchmarkRun)
    bench = benches.prepare(config)
    if args.strategy not in bench.jobs:
        parser.error(f"--strategy={args.strategy}: the config has {', '.join(bench.jobs)}")
    job = bench.jobs[args.strategy]
    if job.drafter.drafts_trees or not (job.drafter.num_draft_tokens and job.drafter.has_probs):
        parser.error(f"--strategy={args.strategy}: choose one that draws chains of drafts")
    bench.load()
    engine = job.engine(job.prompts)
    engine.add_program("compare", compared(engine))
    print(("{:>12}" * len(_HEADS)).format(*_HEADS))
    for task in bench.workload.tasks:
        totals = np.concatenate(list(_decoded(bench, engine, task)))
        cycles, rejection, block = totals.sum(axis=0)
        ratio = block / rejection
        # The error of a ratio of sums, by the residuals of the prompts.
        error = np.sqrt(((totals[:, 2] - ratio * totals[:, 1]) ** 2).sum()) / rejection
        print(
            f"{task:>12}{cycles:12.0f}{rejection / cycles:12.3f}{block / cycles:12.3f}{ratio:12.4f}"
            f"{error:12.4f}",
            flush=True,
        )


def compared(engine: Engine):
    """Returns a program of one cycle by rejection that also compares both rules.

    Its results are the state, and float32 [B, 3]: for each slot 1 if it is active, and the expected
    numbers of tokens that rejection and block verification commit.
    """

    def compare(target, drafter, state):
        rules = engine.rules
        state, proposal = cycle.propose(
            target, drafter, state, rules=rules, block_size=drafter.block_size
        )
        tokens = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
        positions = state.length[:, None] - 1 + jnp.arange(tokens.shape[1])
        output = target(tokens, positions, state.cache, feature_layers=drafter.feature_layers)
        probs = verify.chain_probabilities(
            proposal.tokens, proposal.probs, target.unembed(output.hidden), state.sampling
        )
        # Drafts at and past the limit are not committed.
        lengths = jnp.arange(1, tokens.shape[1])
        counts = lengths < (state.limit - state.length)[:, None]
        found = [1 + (counts * chances).sum(axis=1) for chances in survival(probs)]
        found = jnp.stack([jnp.ones_like(found[0]), *found], axis=1)
        found = jnp.where(state.active[:, None], found, 0)
        state, _ = cycle.conclude(target, drafter, state, proposal, rules=rules)
        return state, found

    return compare


def survival(probs: verify.ChainProbabilities) -> tuple[jax.Array, jax.Array]:
    """Returns the chance that each draft is accepted, float32 [B, G], by rejection and by block.

    Block verification accepts the longest prefix that passes its test, and tests are independent.
    """
    each = jnp.where(probs.q > 0, jnp.minimum(probs.p / jnp.where(probs.q > 0, probs.q, 1), 1), 0)
    chance, _ = verify.prefix_chances(*probs)
    none_passes = jnp.flip(jnp.cumprod(jnp.flip(1 - chance, axis=1), axis=1), axis=1)
    return jnp.cumprod(each, axis=1), 1 - none_passes


def _decoded(bench: Bench, engine: Engine, task: str) -> Iterator[np.ndarray]:
    """Yields the sums of `compared` over all cycles of some prompts of a task, [n, 3]."""
    slots = engine.layout.batch_size
    items = bench.workload.tasks[task]
    for start in range(0, len(items), slots):
        requests = [bench.request(item) for item in items[start : start + slots]]
        yield _sums(engine, requests)


def _sums(engine: Engine, requests: Sequence[Request]) -> np.ndarray:
    """Decodes requests, and returns the sums of `compared`, one row for each."""
    state, layout = engine.new_state(), engine.layout
    for index, request in enumerate(requests):
        state = engine.admit(state, Slot(index, layout.standing_pages(index)), request)
    sums = np.zeros((layout.batch_size, 3))
    while np.any(state.active):
        state, found = engine.run("compare", state)
        sums += found
    return sums[: len(requests)]


if __name__ == "__main__":
    main()
