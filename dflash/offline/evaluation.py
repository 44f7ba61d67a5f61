"""Measures the acceptance length of a drafter in training, on answers that it decodes once."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter
from dflash.drafters.none import NoDrafter
from dflash.inference.acceptance import AnswersTest, check_config
from dflash.inference.engine import Engine
from dflash.inference.replay import Text
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
    """Measurement of τ on the target's answers to the same prompts at every call.

    The first call decodes the answers without drafting. No call decodes with the drafter; see
    `AnswersTest`.

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
        Raises:
          ConfigError: The chances that drafts are accepted under this config are not known.
          InputError: A prompt is unusable.
        """
        check_config(config, drafter)
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
        self._max_length = config.max_length or max_length(self._requests)
        for request in self._requests:
            check_request(request, max_length=self._max_length, vocab_size=target.arch.vocab_size)
        self._test: AnswersTest | None = None

    def __call__(self, params: Any) -> dict[str, float]:
        """Measures the drafter's parameters `params`; see `AnswersTest.__call__`."""
        if self._test is None:
            answers = self._decode()
            self._test = AnswersTest(self._target, self._drafter, answers, self._config)
        return self._test(params)

    def _decode(self) -> dict[str, list[Text]]:
        """Returns the target's answers by source, as decoding with any drafter gives them."""
        engine = Engine(
            self._target,
            NoDrafter(),
            self._config,
            max_length=self._max_length,
            num_stop_ids=max(len(request.stop_ids) for request in self._requests),
        )
        events = decode(engine, self._requests)
        done = {event.id: event.output_ids for event in events if isinstance(event, RequestOutput)}
        answers: dict[str, list[Text]] = {name: [] for name in self._sources}
        for source, request in zip(self._sources, self._requests, strict=True):
            answers[source].append(Text(request.prompt, done[request.id]))
        return answers
