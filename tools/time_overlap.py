"""Times overlapped drafting beside drafting in turn, on two virtual CPU devices.

    export XLA_FLAGS="--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
    taskset -c 0,1 python tools/time_overlap.py configs/tiny_eagle3.yml decode.max_new_tokens=64

The ways of drafting take turns, round by round, and each figure is a median over the rounds. All
verify the same number of drafts, so ssd drafts one more. The table also has the hit rate of the
speculation cache. Everything runs in float32, and the tool stops if outputs differ.
"""

import argparse
import io
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from dflash.config import loader
from dflash.inference.engine import Engine
from dflash.inference.request import Request, RequestOutput
from dflash.inference.stats import SchedulerStats
from dflash.loading import job as jobs
from dflash.measure import table
from dflash.offline.decoding import decode

_WAYS = ("none", "ssd", "pingpong")
_HEADS = ("drafter.overlap", "batch", "τ", "ms per cycle", "cycle ÷ none", "speed ÷ none", "hits")


class Round(NamedTuple):
    """Output of one run over all prompts, and the scheduler's statistics."""

    output_ids: list[tuple[int, ...]]
    stats: SchedulerStats

    @property
    def cycle_ms(self) -> float:
        """Mean time per cycle of all slots."""
        return 1e3 * self.stats.decode_seconds / self.stats.cycles

    @property
    def tau(self) -> float:
        """Mean acceptance length."""
        tokens = sum(len(ids) - 1 for ids in self.output_ids)
        return tokens / self.stats.slot_cycles

    @property
    def seconds(self) -> float:
        """Time of all cycles."""
        return self.stats.decode_seconds


def prepare(
    config_path: str, overrides: Sequence[str], way: str, drafts: int
) -> tuple[Engine, list[Request]]:
    """Returns a compiled engine that verifies `drafts` drafts, and the requests of the config."""
    drafter = loader.load(config_path, overrides).drafter
    drafts += way == "ssd"
    size = (
        f"num_draft_tokens={drafts}"
        if hasattr(drafter, "num_draft_tokens")
        else f"block_size={drafts + 1}"
    )
    settings = f"drafter.{size}", f"drafter.overlap={way}", "dtype=float32"
    config = loader.load(config_path, [*overrides, *settings, "decode.baseline=false"])
    job = jobs.prepare(config, stdin=io.StringIO())
    job.load_weights()
    engine = job.engine()
    engine.compile(len(prompt.ids) for prompt in job.prompts)
    return engine, job.requests(job.prompts)


def run(engine: Engine, requests: Sequence[Request]) -> Round:
    """Decodes all requests once."""
    stats: list[SchedulerStats] = []
    done = [one for one in decode(engine, requests, stats.append) if isinstance(one, RequestOutput)]
    done.sort(key=lambda output: output.id)
    return Round([one.output_ids for one in done], stats[0])


def lines(batch: int, rounds: dict[str, list[Round]]) -> list[tuple[str, ...]]:
    """Returns the table rows of one batch size."""
    rows = []
    for way, own in rounds.items():
        pairs = list(zip(own, rounds["none"], strict=True))
        cycle = statistics.median(one.cycle_ms / plain.cycle_ms for one, plain in pairs)
        speed = statistics.median(plain.seconds / one.seconds for one, plain in pairs)
        lookups = own[0].stats.speculation_lookups
        hits = f"{100 * own[0].stats.speculation_hits / lookups:.0f} %" if lookups else "–"
        milliseconds = statistics.median(one.cycle_ms for one in own)
        figures = f"{own[0].tau:.2f}", f"{milliseconds:.1f}", f"{cycle:.2f}", f"{speed:.2f}"
        rows.append((way, str(batch), *figures, hits))
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batch", type=int, action="append", help="default: 1 and 2")
    arguments = parser.parse_intermixed_args()
    rows: list[tuple[str, ...]] = []
    for batch in arguments.batch or (1, 2):
        overrides = [*arguments.overrides, f"decode.batch_size={batch}"]
        ways = [way for way in _WAYS if way != "pingpong" or batch % 2 == 0]
        engines = {way: prepare(arguments.config, overrides, way, arguments.drafts) for way in ways}
        rounds: dict[str, list[Round]] = {way: [] for way in ways}
        for engine in engines.values():
            run(*engine)  # The first run is slower than all others.
        for _ in range(arguments.rounds):
            for way, engine in engines.items():
                rounds[way].append(run(*engine))
                if rounds[way][-1].output_ids != rounds["none"][-1].output_ids:
                    raise SystemExit(f"{way}: the output differs from that of none")
        rows += lines(batch, rounds)
    print("\n".join(table.aligned([_HEADS, *rows])))


if __name__ == "__main__":
    main()
