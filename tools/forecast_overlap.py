"""Forecasts overlapped drafting on TPU chips, by the roofline of every stage.

    python tools/forecast_overlap.py

Prints the forecast's table of docs/results/overlap.md: tokens per second relative to drafting in
turn on four chips, over which the drafter is split, too.
"""

from collections.abc import Iterator
from typing import NamedTuple

from dflash.config import loader
from dflash.drafters.base import Drafter
from dflash.loading import job as jobs
from dflash.measure import overlap_forecast, roofline
from dflash.measure.overlap_forecast import IN_TURN, PING_PONG, SSD
from dflash.models.decoder import Decoder
from dflash.parallel import chips

CHIP, CONTEXT, FAN_OUT, BATCHES = "v5p", 1024, 3, (1, 4, 16, 64)
TURN_CHIPS, UNSPLIT = 4, "in turn, drafter on one chip"


class Pair(NamedTuple):
    """Models and settings of a table.

    Attributes:
      config: Config of the target and its drafter.
      overrides: Other values of its keys.
      drafts: Number of drafts that a cycle verifies.
      kept: Mean acceptance length with speculation, over that without.
      hit_rate: Probability that the outcome of a sequence was foreseen.
    """

    config: str
    overrides: str
    drafts: int
    kept: float
    hit_rate: float


# Measured on the tiny family; see the page.
PAIRS = {
    "70 B, draft model of 1 B": Pair(
        "configs/qwen3_8b_autoregressive.yml",
        "target.architecture={vocab_size: 128256, hidden_size: 8192, intermediate_size: 28672, "
        "num_hidden_layers: 80, num_attention_heads: 64, num_key_value_heads: 8, head_dim: 128, "
        "max_position_embeddings: 40960, eos_token_id: [1]} drafter.architecture={"
        "num_hidden_layers: 16, hidden_size: 2048, intermediate_size: 8192, num_attention_heads: "
        "32, num_key_value_heads: 8, head_dim: 64, tie_word_embeddings: true}",
        4, 1.0, 0.8,
    ),
    "Qwen3-8B, Qwen3-0.6B": Pair("configs/qwen3_8b_autoregressive.yml", "", 4, 1.0, 0.8),
    "Qwen3-4B, EAGLE-3": Pair("configs/qwen3_4b_eagle3.yml", "", 4, 0.93, 0.8),
    "Qwen3-4B, DFlash": Pair("configs/qwen3_4b_dflash.yml", "", 15, 0.71, 0.8),
}  # fmt: skip


def models_of(pair: Pair) -> tuple[Decoder, Drafter]:
    """Returns the abstract models of a pair."""
    own = pair.overrides.replace(" drafter.", "\ndrafter.").splitlines()
    overrides = *own, "target.checkpoint=random", "drafter.checkpoint=random"
    job = jobs.prepare_models(loader.load(pair.config, overrides), dry=True)
    return job.target, job.drafter


def speeds(
    target: Decoder, drafter: Drafter, pair: Pair, batch: int, split: tuple[int, int]
) -> dict[str, float]:
    """Returns tokens per second relative to drafting in turn on `TURN_CHIPS` chips.

    Args:
      target: Target.
      drafter: Drafter.
      pair: Settings of the pair.
      batch: Number of sequences.
      split: Numbers of chips of the target and of the drafter.
    """

    def stages(batch: int, target_chips: int, drafter_chips: int) -> overlap_forecast.Stages:
        machines = [
            roofline.machine_of_chip(chips.CHIPS[CHIP], count, CHIP)
            for count in (target_chips, drafter_chips)
        ]
        verify = roofline.target_work(target, batch=batch, rows=pair.drafts + 1, context=CONTEXT)
        work = overlap_forecast.work_of(
            target, drafter, batch=batch, drafts=pair.drafts, fan_out=FAN_OUT, context=CONTEXT
        )
        return work.stages(verify.ideal_ms(machines[0]), machines[1])

    in_turn = overlap_forecast.cycle_ms(stages(batch, TURN_CHIPS, TURN_CHIPS))
    unsplit = overlap_forecast.cycle_ms(stages(batch, TURN_CHIPS, 1))
    apart = stages(batch, *split)
    found = {IN_TURN: 1.0, UNSPLIT: in_turn / unsplit}
    found[SSD] = (
        pair.kept
        * in_turn
        / overlap_forecast.ssd_cycle_ms(apart, hit_rate=pair.hit_rate, batch=batch)
    )
    if batch % 2 == 0:
        half = stages(batch // 2, *split)
        found[PING_PONG] = in_turn / overlap_forecast.pingpong_cycle_ms(half)
    return found


def rows() -> Iterator[str]:
    """Yields the lines of the table."""
    ways = UNSPLIT, SSD, PING_PONG
    yield (
        f"| models | batch | {UNSPLIT} | ssd, 2 + 2 chips | pingpong, 2 + 2 chips | choice of 4 | "
        "ssd, 4 + 1 chips | pingpong, 4 + 1 chips |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, pair in PAIRS.items():
        target, drafter = models_of(pair)
        for batch in BATCHES:
            same, more = (speeds(target, drafter, pair, batch, split) for split in ((2, 2), (4, 1)))
            choice = overlap_forecast.choose(same)
            cells = [*(_shown(same.get(way)) for way in ways), choice]
            cells += [_shown(more.get(way)) for way in (SSD, PING_PONG)]
            yield f"| {name} | {batch} | {' | '.join(cells)} |"


def _shown(speed: float | None) -> str:
    return "–" if speed is None else f"{speed:.2f}"


if __name__ == "__main__":
    print("\n".join(rows()))
