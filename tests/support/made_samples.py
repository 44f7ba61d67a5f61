"""Samples with known times, for the arithmetic that comes after measuring."""

from collections.abc import Mapping, Sequence

from dflash.inference.request import RequestOutput
from dflash.measure.engine import Parts
from dflash.measure.samples import Sample, TaskRound


def completion(
    index: int,
    lengths: Sequence[int],
    cycle_ms: float,
    *,
    begin: float = 100.0,
    prefill_ms: float = 5.0,
    output: Sequence[int] | None = None,
) -> RequestOutput:
    """A prompt that took as many cycles of `cycle_ms` as it has acceptance lengths."""
    ids = tuple(range(1 + sum(lengths))) if output is None else tuple(output)
    decode_ms = cycle_ms * len(lengths)
    return RequestOutput(
        id=index, output_ids=ids, finish_reason="length", acceptance_lengths=tuple(lengths),
        block_sizes=(16,) * len(lengths), prefill_ms=prefill_ms, decode_ms=decode_ms,
        decode_clock_s=decode_ms / 1e3, finished_at=begin + decode_ms / 1e3,
    )  # fmt: skip


def task_round(
    task: str,
    number: int,
    cycles: Mapping[str, tuple[Sequence[Sequence[int]], float]],
    parts: Mapping[str, tuple[float, float]],
) -> TaskRound:
    """One round of prompts decoded one at a time.

    Args:
      cycles: by strategy, the acceptance lengths of each prompt, and the time of a cycle.
      parts: by strategy, the times of draft and verification.
    """
    samples = []
    for strategy, (prompts, cycle_ms) in cycles.items():
        for place, lengths in enumerate(prompts):
            done = (completion(place, lengths, cycle_ms),)
            samples.append(Sample(task, strategy, number, done, (place,)))
    timed = {name: Parts(*times, context_tokens=64) for name, times in parts.items()}
    return TaskRound(task, number, tuple(samples), timed)
