"""Engines over the tiny family, and the token sequences that they must produce."""

import copy
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from dflash.config import schema
from dflash.drafters.base import Drafter
from dflash.drafters.none import NoDrafter
from dflash.inference import scheduler
from dflash.inference.engine import Engine
from dflash.models.decoder import Decoder
from support.models import ARCHITECTURE, ONE_DEVICE, target


def engine(
    model: Drafter | None = None,
    *,
    mesh: tuple[int, int, int] = ONE_DEVICE,
    max_length: int = 64,
    stop_ids: Sequence[int] = (),
    on: Decoder | None = None,
    **options,
) -> Engine:
    """An engine over the tiny target; `options` are DecodeConfig's. Nothing is compiled yet."""
    config = schema.DecodeConfig(**{"page_size": 16, "prefill_chunk": 16} | options)
    model = NoDrafter() if model is None else model
    return Engine(on or target(mesh), model, config, max_length=max_length, stop_ids=stop_ids)


def resampled(base: Engine, **sampling) -> Engine:
    """`base` with other sampling options; both share all programs."""
    twin = copy.copy(base)
    twin._config = dataclasses.replace(base._config, **sampling)
    return twin


def redrafted(base: Engine, model: Drafter) -> Engine:
    """`base` with other weights in its drafter; both share all programs."""
    twin = copy.copy(base)
    twin._drafter_params = Engine(
        base._abstract_target, model, base._config, max_length=base.layout.max_length
    )._drafter_params
    return twin


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of these lengths, whose first tokens tell them apart while there are enough."""
    rng = np.random.default_rng(seed)
    prompts = []
    for i, length in enumerate(lengths):
        rest = rng.integers(0, ARCHITECTURE.vocab_size, length - 1).tolist()
        prompts.append((i % ARCHITECTURE.vocab_size, *rest))
    return prompts


def decode(
    run: Engine,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int] | int,
    first_index: int = 0,
) -> list[scheduler.Completion]:
    """Completions of all prompts, in their order.

    Args:
      limits: max_new_tokens, of each prompt or of all.
      first_index: of the first request; another one means other noise.
    """
    if isinstance(limits, int):
        limits = [limits] * len(prompts)
    requests = [
        scheduler.Request(first_index + i, tuple(prompt), limit)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    events = scheduler.decode(run, requests)
    done = [event for event in events if isinstance(event, scheduler.Completion)]
    done.sort(key=lambda completion: completion.index)
    assert [one.index for one in done] == [request.index for request in requests]
    return done


def check_plain_outputs(
    run: Engine, prompts: Sequence[Sequence[int]], limits: Sequence[int], stop_ids: Sequence[int]
) -> None:
    """Asserts that an engine's outputs are those of plain decoding, greedy and drawn."""
    for temperature in (0.0, 0.8):
        how = {"temperature": temperature, "seed": 4}
        done = decode(resampled(run, **how), prompts, limits)
        wanted = expected(prompts, limits, stop_ids=stop_ids, **how)
        assert [(one.output_ids, one.finish_reason) for one in done] == wanted


def expected(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    first_index: int = 0,
    stop_ids: Sequence[int] = (),
    **sampling,
) -> list[tuple[tuple[int, ...], str]]:
    """Output ids and finish reasons as plain decoding has them, cut at limits and stop tokens."""
    results = []
    whole = _plain_outputs(tuple(prompts), 32, first_index, **sampling)
    for ids, limit in zip(whole, limits, strict=True):
        ids = ids[:limit]
        stops = [i for i, token in enumerate(ids) if token in stop_ids]
        ids = ids[: stops[0] + 1] if stops else ids
        results.append((ids, "stop" if stops else "length"))
    return results


@functools.cache
def _plain_engine() -> Engine:
    return engine(batch_size=8, sync_every=8, max_length=96)


@functools.cache
def _plain_outputs(prompts, num_tokens, first_index, **sampling):
    run = resampled(_plain_engine(), **sampling)
    return [one.output_ids for one in decode(run, prompts, num_tokens, first_index)]
