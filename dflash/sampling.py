"""Sampling parameters of the Python API, `dflash.Sampling`."""

import dataclasses
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config.schema import DecodeConfig, SamplingConfig
from dflash.inference.request import Request
from dflash.text import grammar as grammars
from dflash.text.grammar import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling and stopping parameters; defaults are those of the config's `decode` group.

    >>> Sampling(temperature=0.8, max_tokens=64, seed=1).temperature
    0.8

    Attributes:
      temperature: Sampling temperature; 0 is greedy.
      top_k: Number of likeliest tokens to draw from; 0 is off.
      top_p: Probability mass of the likeliest tokens to draw from; 1 is off.
      min_p: Smallest probability of a token to draw, relative to the likeliest token; 0 is off.
      presence_penalty: Value subtracted from the logits of tokens in the output.
      frequency_penalty: Value subtracted once per occurrence of the token in the output.
      repetition_penalty: Divisor of positive logits, and factor of negative logits, of tokens in
        the prompt or the output; 1 is off.
      logit_bias: Values added to the logits of tokens, by token id.
      max_tokens: Maximum number of output tokens.
      min_tokens: Number of output tokens before which no stop token is drawn.
      seed: Seed of the noise; each prompt of a call draws with its own noise.
      first_sequence: Number of the first prompt's noise under the seed; the others' follow.
      stop_token_ids: Tokens that end the output, in addition to the checkpoint's and the config's.
      ignore_eos: Ignore the stop tokens of the checkpoint.
      logprobs: Number of the target's likeliest tokens to report beside each output token; None
        reports nothing.
      json_schema: JSON schema that the output must match, as a value or as text;
        {"type": "object"} matches any JSON object.
      regex: Regular expression that the whole output must match.
      lark: Context-free grammar that the output must match, in llguidance's dialect of Lark.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    first_sequence: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None

    def __post_init__(self):
        """Raises InputError if a value has the wrong type; ranges are checked with the request."""
        for name, (kind, expected) in _KINDS.items():
            self._check(name, getattr(self, name), kind, expected)
        for token in self.stop_token_ids:
            self._check("stop_token_ids", token, numbers.Integral, "token ids")
        for token, bias in self.logit_bias.items():
            self._check("logit_bias", token, numbers.Integral, "token ids that are integers")
            self._check("logit_bias", bias, numbers.Real, "biases that are numbers")
        constraints = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(constraints) > 1:
            names = " and ".join(constraints)
            raise errors.InputError(f"Sampling: {names}: expected at most one of them")

    def _check(self, name: str, value: Any, kind: type, expected: str) -> None:
        is_absent = value is None and getattr(self, name) is self.__dataclass_fields__[name].default
        # Python counts True and False as integers.
        is_number = not isinstance(value, bool) or kind is bool
        if not is_absent and not (isinstance(value, kind) and is_number):
            raise errors.InputError(f"Sampling: {name}: expected {expected}, got {value!r}")

    def applied_to(self, config: DecodeConfig) -> DecodeConfig:
        """Returns the config with these parameters in place of its own."""
        names = {name: name for name in (*_SAMPLING, "ignore_eos")}
        names |= {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        changes = {key: getattr(self, name) for key, name in names.items()}
        changes = {key: value for key, value in changes.items() if value is not None}
        stop_ids = (*config.stop_ids, *self.stop_token_ids)
        return dataclasses.replace(config, **changes, stop_ids=stop_ids)

    def requests(
        self, requests: Iterable[Request], vocabulary: Callable[[], Vocabulary]
    ) -> list[Request]:
        """Returns copies of requests with the parameters that configs do not have.

        Args:
          requests: Requests of the config that `applied_to` returns.
          vocabulary: Function that returns the tokenizer's vocabulary, called only for a grammar.
        Raises:
          InputError: The grammar cannot be compiled.
        """
        sources = {kind: getattr(self, kind) for kind in _GRAMMARS}
        stated = ((kind, source) for kind, source in sources.items() if source is not None)
        grammar = next((grammars.of_source(*pair, vocabulary()) for pair in stated), None)
        bias = tuple((int(token), float(bias)) for token, bias in self.logit_bias.items())
        return [
            dataclasses.replace(
                request,
                sampling=dataclasses.replace(
                    request.sampling,
                    logit_bias=bias,
                    sequence=request.sampling.sequence + self.first_sequence,
                ),
                logprobs=self.logprobs,
                grammar=grammar,
            )
            for request in requests
        ]


_GRAMMARS = ("json_schema", "regex", "lark")
_SAMPLING = {field.name: field.type for field in dataclasses.fields(SamplingConfig)}
_INTEGER, _NUMBER = (numbers.Integral, "an integer"), (numbers.Real, "a number")
# Type of each parameter, with its name in errors; a JSON schema is checked by its grammar.
_KINDS = {
    **{name: _INTEGER if kind is int else _NUMBER for name, kind in _SAMPLING.items()},
    **dict.fromkeys(("max_tokens", "min_tokens", "logprobs", "first_sequence"), _INTEGER),
    **dict.fromkeys(("regex", "lark"), (str, "a string")),
    "ignore_eos": (bool, "True or False"),
    "logit_bias": (Mapping, "biases by token id"),
    "stop_token_ids": (Collection, "token ids"),
}
