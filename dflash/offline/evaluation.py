"""Measures the acceptance length of a drafter in training, through the decode engine."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter
from dflash.inference.engine import Engine
from dflash.inference.request import (
    Request,
    RequestOutput,
    RequestSampling,
    check_request,
    max_length,
)
from dflash.models.decoder import Decoder
from dflash.offline.decoding import decode


class DraftingTest:
    """Measurement that decodes the same prompts with new weights at every call, compiling once.

    Usage:
      test = DraftingTest(target, drafter, config, {"math": [ids, ...]})
      test(params)  # {"tau": 4.2, "tau/math": 4.2}
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        config: DecodeConfig,
        prompts: Mapping[str, Sequence[Sequence[int]]],
        *,
        stop_ids: Sequence[int],
    ):
        """Builds the requests; nothing is compiled yet.

        Args:
          drafter: Drafter with the target's dtype; its parameters may be abstract.
          config: Sampling parameters and shape of the decode loop.
        """
        self._target, self._drafter, self._config = target, drafter, config
        stop_ids = tuple(sorted(set(stop_ids)))
        pairs = [
            (name, tuple(ids)) for name, source_prompts in prompts.items() for ids in source_prompts
        ]
        self._sources = [name for name, _ in pairs]
        self._requests = [
            Request(
                index,
                ids,
                config.max_new_tokens,
                RequestSampling.from_config(config, index),
                stop_ids,
            )
            for index, (_, ids) in enumerate(pairs)
        ]
        longest = config.max_length or max_length(self._requests)
        for request in self._requests:
            check_request(request, max_length=longest, vocab_size=target.arch.vocab_size)
        self._max_length = longest
        self._engine: Engine | None = None

    def __call__(self, params: Any) -> dict[str, float]:
        """Decodes all prompts with the drafter's parameters `params`.

        Returns:
          Mean acceptance length "tau" over all cycles, and "tau/NAME" per source, in tokens per
          cycle; empty if every prompt ended at its first token.
        """
        nnx.update(self._drafter, params)
        if self._engine is None:
            self._engine = Engine(
                self._target,
                self._drafter,
                self._config,
                max_length=self._max_length,
                num_stop_ids=max(len(request.stop_ids) for request in self._requests),
            )
        self._engine.set_drafter(self._drafter)
        events = decode(self._engine, self._requests)
        done = [event for event in events if isinstance(event, RequestOutput)]
        return self._measure(done)

    def _measure(self, done: Sequence[RequestOutput]) -> dict[str, float]:
        lengths: dict[str, list[int]] = {name: [] for name in self._sources}
        for completion in done:
            lengths[self._sources[completion.id]] += completion.acceptance_lengths
        everything = [length for source_lengths in lengths.values() for length in source_lengths]
        if not everything:
            return {}
        by_source = {
            name: statistics.fmean(source_lengths)
            for name, source_lengths in lengths.items()
            if source_lengths
        }
        metrics = {"tau": statistics.fmean(everything)}
        return metrics | {f"tau/{name}": value for name, value in by_source.items()}
