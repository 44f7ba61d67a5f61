"""Times the gaps between tokens of running streams while long prompts arrive.

    taskset -c 0,1 python tools/time_roles.py configs/tiny_dflash.yml

One server that prefills and decodes is compared with a server of each role, on two cores of one
machine: the servers of a role have one core each, and the single server has one core, then both.
Each kind gets the same requests in turn, round by round, without and with long prompts. The figures
are medians over the rounds. One arrival brings the tokens of a whole dispatch. The client is not
pinned, so it shares the cores.
"""

import argparse
import asyncio
import contextlib
import os
import pathlib
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from support import served

from dflash.measure import load_client, table
from dflash.measure.load_client import Answer, LoadPlan

_TEXT = "Hugo plants 28 trees in a park. Then Hugo plants 12 more trees."
_TOKEN_IDS = range(20, 250)  # Ids of ordinary tokens of the tiny family.
_HEADS = (
    *("servers", "prompts", "gap, median", "gap, p99", "longest gap", "ms to first token"),
    "tokens/s",
)


class Load(NamedTuple):
    """Requests of a round.

    Attributes:
      streams: Number of streams that run at a time.
      tokens: Tokens of each stream.
      prompts: Number of long prompts.
      prompt_tokens: Length of each.
      rate: Mean number of long prompts per second.
    """

    streams: int
    tokens: int
    prompts: int
    prompt_tokens: int
    rate: float


class Round(NamedTuple):
    """Answers of one round."""

    streams: list[Answer]
    prompts: list[Answer]

    def figures(self) -> tuple[float, float, float, float, float]:
        """Returns gaps (median, p99, longest), time to first token, all in ms, and tokens/s."""
        gaps = sorted(1e3 * gap for answer in self.streams for gap in answer.gaps)
        waits = [1e3 * (answer.first - answer.begin) for answer in self.prompts]
        speed = sum(answer.tokens for answer in self.streams) / max(
            answer.last for answer in self.streams
        )
        return (
            statistics.median(gaps),
            gaps[int(0.99 * len(gaps))],
            gaps[-1],
            statistics.median(waits) if waits else 0.0,
            speed,
        )


def start(
    stack: contextlib.ExitStack, config: str, cores: Sequence[int], overrides: Sequence[str]
) -> str:
    """Starts a server on some cores; returns its address once it is ready."""
    own = os.sched_getaffinity(0)
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    os.sched_setaffinity(0, cores)  # The server inherits it.
    try:
        server = served.serving(pathlib.Path(directory), *overrides, config_text=config)
        return stack.enter_context(server).url
    finally:
        os.sched_setaffinity(0, own)


def start_all(stack: contextlib.ExitStack, config: str, overrides: Sequence[str]) -> dict[str, str]:
    """Returns the URLs of all kinds of servers by name."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    prefill = start(stack, config, [second], [*overrides, "serve.role=prefill"])
    decode = [*overrides, "serve.role=decode", f"serve.prefill={prefill}"]
    return {
        "one, on one core": start(stack, config, [first], overrides),
        "one, on both cores": start(stack, config, [first, second], overrides),
        "one for each role, one core each": start(stack, config, [first], decode),
    }


async def run(url: str, load: Load, seed: int) -> Round:
    """Sends the requests of a round; the same seed gives the same requests."""
    draw = random.Random(seed)
    stream = {"prompt": _TEXT, "max_tokens": load.tokens, "ignore_eos": True, "temperature": 0}
    long = [
        {"prompt": draw.choices(_TOKEN_IDS, k=load.prompt_tokens), "max_tokens": 2}
        for _ in range(load.prompts)
    ]
    answers = await asyncio.gather(
        load_client.run(LoadPlan(url, [stream] * load.streams, at_a_time=load.streams)),
        load_client.run(LoadPlan(url, long, rate=load.rate, seed=seed)),
    )
    for answer in (*answers[0], *answers[1]):
        if answer.error is not None:
            raise SystemExit(f"{url}: {answer.error}")
    return Round(*answers)


def lines(rounds: dict[tuple[str, int], list[Round]]) -> list[tuple[str, ...]]:
    """Returns the table rows; in parentheses: relative to the first servers in the same round."""
    rows: list[tuple[str, ...]] = []
    first = next(iter(rounds))[0]
    for (name, prompts), own in rounds.items():
        columns = zip(*(one.figures() for one in own), strict=True)
        others = zip(*(one.figures() for one in rounds[first, prompts]), strict=True)
        shown = [_shown(*pair) for pair in zip(columns, others, strict=True)]
        rows.append((name, str(prompts), *shown))
    return rows


def _shown(figures: Sequence[float], others: Sequence[float]) -> str:
    if not all(others):
        return "–"
    ratios = (one / other for one, other in zip(figures, others, strict=True))
    return f"{statistics.median(figures):.0f} ({statistics.median(ratios):.2f})"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=1.0)
    arguments = parser.parse_intermixed_args()
    counts = arguments.streams, arguments.tokens, arguments.prompts, arguments.prompt_tokens
    load = Load(*counts, arguments.rate)
    overrides = [
        *("decode.batch_size=4", "decode.partial_dispatches=false", "serve.grammars=false"),
        f"decode.max_length={max(load.prompt_tokens, load.tokens) + 128}",
        *arguments.overrides,
    ]
    config = pathlib.Path(arguments.config).read_text(encoding="utf-8")
    rounds: dict[tuple[str, int], list[Round]] = {}
    with contextlib.ExitStack() as stack:
        urls = start_all(stack, config, overrides)
        for url in urls.values():
            asyncio.run(run(url, load._replace(tokens=64, prompts=1), -1))  # The first is slower.
        for seed in range(arguments.rounds):
            for prompts in (0, load.prompts):
                for name, url in urls.items():
                    done = asyncio.run(run(url, load._replace(prompts=prompts), seed))
                    rounds.setdefault((name, prompts), []).append(done)
                    print(name, prompts, *map(round, done.figures()), file=sys.stderr, flush=True)
    print("\n".join(table.aligned([_HEADS, *lines(rounds)])))


if __name__ == "__main__":
    main()
