"""Forecasts the gaps between dispatches while long prompts arrive, by the roofline of every stage.

    python tools/forecast_roles.py

Prints the forecast's tables of docs/results/roles.md.
"""

from collections.abc import Iterator

from dflash.config import loader
from dflash.drafters.base import Drafter
from dflash.loading import job as jobs
from dflash.measure import roles_forecast, roofline
from dflash.models.decoder import Decoder
from dflash.parallel import chips

CONFIG, CHIP = "configs/qwen3_4b_dflash.yml", "v5p"
BATCH, CONTEXT, SYNC_EVERY = 8, 1024, 4
PROMPTS, CHUNKS = (2048, 8192, 32768), (512, 2048, 8192)
ROOM, LONGEST = 1024, 40960  # Room for output behind a prompt, and the target's context length.
GB_PER_S = (1, 10)


def models() -> tuple[Decoder, Drafter]:
    """Returns the abstract models."""
    overrides = "target.checkpoint=random", "drafter.checkpoint=random"
    job = jobs.prepare_models(loader.load(CONFIG, overrides), dry=True)
    return job.target, job.drafter


def gaps(target: Decoder, drafter: Drafter) -> Iterator[str]:
    """Yields the table of gaps."""
    one, two = (roofline.machine_of_chip(chips.CHIPS[CHIP], count, CHIP) for count in (1, 2))
    yield (
        "| prompt by chunk | gaps with a chunk | gap without | longest gap, one server on one chip "
        "| longest gap, one server on two chips | longest gap, one for each role "
        "| first token, one server on one chip | on two chips | one for each role |"
    )
    yield "|---" * 9 + "|"
    for prompt in PROMPTS:
        lengths = {"prompt": prompt, "max_length": prompt + ROOM}
        size = roles_forecast.rows_bytes(target, drafter, **lengths)
        for chunk in (chunk for chunk in CHUNKS if chunk <= prompt):
            longest, first = [], []
            for machine in (one, two):
                quiet = dispatch_ms(target, drafter, machine)
                chunks = roles_forecast.chunks_ms(target, machine, prompt=prompt, chunk=chunk)
                longest.append(quiet + max(chunks))
                first.append(sum(chunks) + quiet * (len(chunks) - 1))
            quiet = dispatch_ms(target, drafter, one)
            longest.append(quiet + roles_forecast.write_ms(one, size))
            alone = roles_forecast.chunks_ms(target, one, prompt=prompt, chunk=chunk)
            first.append(sum(alone) + size / GB_PER_S[-1] / 1e6 + longest[-1])
            shown = [f"{quiet:.1f}", *(f"{ms:.1f}" for ms in longest)]
            shown += [f"{ms:,.0f}" for ms in first]
            yield f"| {prompt:,} by {chunk:,} | {len(alone)} | {' | '.join(shown)} |"


def dispatch_ms(target: Decoder, drafter: Drafter, machine: roofline.Machine) -> float:
    """Returns the time of a dispatch of cycles."""
    cycle = roles_forecast.cycle_ms(target, drafter, machine, batch=BATCH, context=CONTEXT)
    return SYNC_EVERY * cycle


def travel(target: Decoder, drafter: Drafter) -> Iterator[str]:
    """Yields the table of what travels."""
    machine = roofline.machine_of_chip(chips.CHIPS[CHIP], 1, CHIP)
    rates = " | ".join(f"ms at {rate} GB/s" for rate in GB_PER_S)
    yield f"| prompt | `decode.max_length` | GB | {rates} | ms to write |"
    yield "|---|---|---|" + "---|" * len(GB_PER_S) + "---|"
    for prompt in PROMPTS:
        for length in (prompt + ROOM, LONGEST):
            size = roles_forecast.rows_bytes(target, drafter, prompt=prompt, max_length=length)
            times = " | ".join(f"{size / rate / 1e6:,.0f}" for rate in GB_PER_S)
            write = roles_forecast.write_ms(machine, size)
            yield f"| {prompt:,} | {length:,} | {size / 1e9:.2f} | {times} | {write:.1f} |"


def main() -> None:
    """Prints both tables."""
    target, drafter = models()
    print("\n".join(gaps(target, drafter)), end="\n\n")
    print("\n".join(travel(target, drafter)))


if __name__ == "__main__":
    main()
