"""What a cycle on the device costs beside the sum of its parts.

    python benchmarks/cycle.py [CONFIG] [key=value ...]

A cycle is one trip of the decode loop: draft, verify, accept, commit, observe. Its parts are jitted
alone and blocked on: the target's forward over a block, the drafter's forward, and the drafter's
taking-in of what was committed. All are timed in turn, round after round; the ratios are medians
of ratios within a round, so they hold on a machine whose speed drifts.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config import loader
from dflash.inference import job as jobs
from dflash.inference.engine import Engine, Slot
from dflash.inference.sampling import SequenceSampler

ROUNDS = 15
PROMPT_TOKENS = 128
NEW_TOKENS = 256
DEFAULTS = ("configs/random_tiny_dflash.yml",)


def main(argv: list[str]) -> None:
    """Prints medians over rounds."""
    path, *overrides = argv or DEFAULTS
    drafting = prepare(path, overrides)
    plain = prepare(path, [*overrides, "drafter.name=none"])
    engine, state = fill(drafting)
    plain_engine, plain_state = fill(plain)
    timers = {
        "cycle": lambda: per_cycle(engine, state),
        "plain token": lambda: per_cycle(plain_engine, plain_state),
    } | parts(drafting, state)
    for timer in timers.values():
        timer()  # compiles
    rounds = [{name: timer() for name, timer in timers.items()} for _ in range(ROUNDS)]
    for name in timers:
        print(f"{name:<28}{median(r[name] for r in rounds):8.2f} ms")
    forwards = ("target block", "draft")
    print_ratio("cycle / (target + draft)", rounds, "cycle", forwards)
    print_ratio("cycle / all its parts", rounds, "cycle", (*forwards, "observe"))
    print_ratio("plain token / target row", rounds, "plain token", ("target row",))
    print(f"{jax.device_count()} × {jax.devices()[0].device_kind}, jax {jax.__version__}")


def prepare(path: str, overrides: list[str]) -> jobs.Job:
    """A job with its weights."""
    job = jobs.prepare(loader.load(path, overrides), stdin=sys.stdin)
    job.load_weights()
    return job


def fill(job: jobs.Job):
    """An engine, and a state with one prompt in slot 0."""
    prompt = [1 + i % 100 for i in range(PROMPT_TOKENS)]
    limit = PROMPT_TOKENS + NEW_TOKENS
    engine = Engine(job.target, job.drafter, job.config.decode, max_length=limit)
    pages = tuple(range(1, 1 + engine.layout.pages_per_sequence))
    prefix = engine.prefill(prompt)
    return engine, engine.insert(engine.new_state(), prefix, Slot(0, pages), limit)


def parts(job: jobs.Job, state) -> dict:
    """Timers of the parts of a cycle, each a jitted function of its own, in milliseconds."""
    target_def, target_params = nnx.split(job.target)
    drafter_def, drafter_params = nnx.split(job.drafter)
    rows = job.drafter.block_size
    position = state.length - 1

    def forward(cache, params, tokens):
        target = nnx.merge(target_def, params)
        positions = position[:, None] + jnp.arange(tokens.shape[1])
        out = target(tokens, positions, cache, feature_layers=job.drafter.feature_layers)
        return out.cache, (jnp.argmax(target.unembed(out.hidden), -1), out.features)

    def draft(drafter_state, params, heads_params):
        heads, drafter = nnx.merge(target_def, heads_params), nnx.merge(drafter_def, params)
        sampler = SequenceSampler(state.sampling)
        proposal, _ = drafter.draft(drafter_state, state.anchor, position, sampler, heads)
        return drafter_state, proposal

    def observe(drafter_state, params, tokens, features):
        drafter = nnx.merge(drafter_def, params)
        count = jnp.ones_like(position)
        return drafter.observe(drafter_state, position, tokens, count, features), ()

    batch = state.anchor.shape[0]
    width = len(job.drafter.feature_layers) * job.target.arch.hidden_size
    features = jnp.ones((batch, rows, width), job.drafter.dtype)
    tokens = jnp.ones((batch, rows + 1), jnp.int32)
    return {
        "target block": timed(forward, state.cache, target_params, tokens[:, :rows]),
        "target row": timed(forward, state.cache, target_params, tokens[:, :1]),
        "draft": timed(draft, state.drafter, drafter_params, target_params),
        "observe": timed(observe, state.drafter, drafter_params, tokens, features),
    }


def timed(function, carry, *inputs):
    """A timer, in milliseconds, of function(carry, *inputs) -> (carry, results).

    The carry is donated from call to call, as the loop donates its state: without that, every call
    would pay for a copy of the caches that no cycle makes.
    """
    jitted = jax.jit(function, donate_argnums=0)
    box = [jax.tree.map(jnp.copy, carry)]

    def timer():
        begin = time.perf_counter()
        box[0], _ = jax.block_until_ready(jitted(box[0], *inputs))
        return 1e3 * (time.perf_counter() - begin)

    return timer


def per_cycle(engine, state) -> float:
    """Milliseconds of one cycle within a dispatch of sync_every."""
    state = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # a dispatch consumes its state
    begin = time.perf_counter()
    state, report = jax.block_until_ready(engine.generate(state))
    return 1e3 * (time.perf_counter() - begin) / int(report.cycles)


def print_ratio(title: str, rounds: list[dict], whole: str, pieces: tuple[str, ...]) -> None:
    ratio = median(r[whole] / sum(r[piece] for piece in pieces) for r in rounds)
    print(f"{title:<28}{ratio:8.3f}")


def median(values) -> float:
    return statistics.median(list(values))


if __name__ == "__main__":
    main(sys.argv[1:])
