"""Requests for outputs in any dialect: prompts, sampling, limits, and contents of the response."""

import dataclasses
import functools
import itertools
import secrets
from collections.abc import Iterator
from typing import Any

from dflash import errors
from dflash.config.schema import INT64_MAX, SamplingConfig, subset
from dflash.inference.request import Request, RequestSampling
from dflash.serving.bodies import MAX_CHOICES, SamplingBody
from dflash.serving.encoding import token_ids
from dflash.serving.served_model import ServedModel
from dflash.serving.structured_output import StructuredOutput
from dflash.serving.validation import RequestError, unsupported
from dflash.text import jsonl
from dflash.text.chat_formats.rules import AnswerRules
from dflash.text.chat_formats.table import ChatFormat
from dflash.text.grammar import Grammar
from dflash.text.token_rules import TokenRules

NUM_STOP_IDS = 16  # Maximum number of stop tokens that a request may add to those of the model.


@dataclasses.dataclass(frozen=True)
class ResponseOptions:
    """Format and contents of a response.

    Attributes:
      logprobs: Number of likeliest tokens to report at each position; None reports no
        log-probabilities.
      drafts: Report which tokens were drafted.
      metrics: Report how many drafts each cycle accepted.
      token_ids: Report the ids of prompts and outputs.
      prompt_logprobs: Number of likeliest tokens to report at each position of the prompt; None
        reports no log-probabilities of prompts.
    """

    stream: bool = False
    usage: bool = False
    running_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    special_tokens: bool = False
    stop: bool = False
    drafts: bool = False
    reasoning: bool = True
    metrics: bool = False
    token_ids: bool = False
    prompt_logprobs: int | None = None

    @property
    def scored(self) -> int | None:
        """Number of likeliest tokens that are needed at each position of the prompt, or None."""
        echoed = self.logprobs if self.echo else None
        return max((self.prompt_logprobs, echoed), key=lambda count: -1 if count is None else count)


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """One HTTP request for outputs.

    Attributes:
      prompts: Token ids of the prompts; each gets `choices` outputs.
      sampling: Sampling parameters; output i of a prompt is sequence i under the seed.
      max_new_tokens: Maximum number of output tokens; None is the config's maximum, reduced to the
        room that the prompt leaves.
      stop_ids: Tokens that end an output, those of the model and the config included.
      grammar: Compiled form of `structure`; None until it is compiled.
      token_rules: Tokens and sequences of tokens that outputs may not have; None for none.
      drafting: Decode with drafts; False selects plain decoding, for comparison.
      cache_salt: Salt of the prefix cache; see `inference.request.Request`.
      priority: Number by which requests wait; lower ones go first.
      chat_format: Format by which outputs are parsed; None for plain text.
      rules: What an answer may contain, for the parser.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: RequestSampling
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    choices: int = 1
    options: ResponseOptions = ResponseOptions()
    structure: StructuredOutput | None = None
    grammar: Grammar | None = None
    token_rules: TokenRules | None = None
    drafting: bool = True
    cache_salt: str = ""
    priority: int = 0
    chat_format: ChatFormat | None = None
    rules: AnswerRules | None = None
    adapter: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Total number of prompt tokens."""
        return sum(map(len, self.prompts))

    def requests(self, model: ServedModel, ids: Iterator[int]) -> list[Request]:
        """Returns requests by prompt, then output; raises RequestError for too long a prompt."""
        return [
            Request(
                id=next(ids),
                prompt=prompt,
                max_new_tokens=self._limit(prompt, model),
                sampling=dataclasses.replace(self.sampling, sequence=number),
                stop_ids=self.stop_ids,
                min_new_tokens=self.min_new_tokens,
                logprobs=self.options.logprobs,
                grammar=self.grammar,
                token_rules=self.token_rules,
                rejected=self.options.drafts,
                cache_salt=self.cache_salt,
                adapter=self.adapter,
                prompt_logprobs=self.options.scored,
            )
            for prompt in self.prompts
            for number in range(self.choices)
        ]

    def _limit(self, prompt: tuple[int, ...], model: ServedModel) -> int:
        room = model.max_length - len(prompt)
        limit = self.max_new_tokens
        if limit is None:
            limit = max(1, min(model.decode.max_new_tokens, room))
        if limit > room:
            raise RequestError(
                f"{len(prompt)} prompt tokens + {limit} output tokens = {len(prompt) + limit}, but "
                f"the context holds {model.max_length}; shorten one of them",
                param="max_tokens" if len(prompt) < model.max_length else "prompt",
                code="context_length_exceeded",
            )
        if self.min_new_tokens > limit:
            raise RequestError(
                f"min_tokens: {self.min_new_tokens} is more than the limit of {limit} tokens",
                param="min_tokens",
            )
        return limit


def adapter_number(name: Any, model: ServedModel, param: str = "model") -> int:
    """Returns the number of the adapter that a request names as its model, 0 for none.

    Args:
      name: Value of the field; no string if it is absent, or invalid in another way.
    Raises:
      RequestError: There is no such model.
    """
    names = model.served_names
    if not isinstance(name, str) or name == model.root:
        return 0
    if name in names:
        return names.index(name)
    raise RequestError(
        f"{param}: {jsonl.quote(name)} is not served here; this server has "
        f"{', '.join(map(repr, names))}",
        param=param,
        status=404,
        code="model_not_found",
    )


def complete(
    body: SamplingBody,
    model: ServedModel,
    prompts: tuple[tuple[int, ...], ...],
    options: ResponseOptions,
    cache_salt: str | None,
) -> CompletionRequest:
    """Builds a request from the fields that all dialects share.

    Args:
      cache_salt: Salt of the prefix cache; None if the request has none.
    Raises:
      RequestError: A field is invalid or not supported; the error names it.
    """
    if cache_salt is None:
        cache_salt = "" if model.shares_prefixes else secrets.token_hex(16)
    minimum, constraints = getattr(body, body.MINIMUM), body.constraints()
    request = CompletionRequest(
        prompts=prompts,
        sampling=_sampling(body, model),
        max_new_tokens=one_value(body, body.LIMITS),
        min_new_tokens=model.decode.min_new_tokens if minimum is None else minimum,
        stop=tuple(dict.fromkeys(body.stop)),
        stop_ids=_stop_ids(body, model),
        choices=body.n,
        options=options,
        structure=constraints[0] if constraints else None,
        token_rules=_token_rules(body, model),
        drafting=body.drafting,
        cache_salt=cache_salt,
    )
    if body.n * len(prompts) > MAX_CHOICES:
        message = f"n: {body.n} outputs for each of {len(prompts)} prompts"
        raise RequestError(f"{message}; expected at most {MAX_CHOICES} in all", param="n")
    if len(constraints) > 1:
        param, other = constraints[1].param, constraints[0].param
        raise RequestError(f"{param}: {other} is given too; keep one of them", param=param)
    check_structure(request)
    if not body.drafting and not model.compares:
        raise unsupported("drafting", "false needs a server with serve.compare=true")
    return request


def check_structure(request: CompletionRequest) -> None:
    """Raises RequestError if an output has a constraint, but no stop token to end with."""
    if request.structure is not None and not request.stop_ids:
        param = request.structure.param
        message = f"{param}: needs a stop token; give stop_token_ids, or leave out ignore_eos"
        raise RequestError(message, param=param)


def one_value(body: SamplingBody, names: tuple[str, ...]) -> int | None:
    """Returns the value of several fields for the same parameter; None if all are absent."""
    values = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if len(set(values.values())) > 1:
        first, *_, last = values
        raise RequestError(f"{last}: differs from {first}; give one of them", param=last)
    return next(iter(values.values()), None)


def _sampling(body: SamplingBody, model: ServedModel) -> RequestSampling:
    changes = subset(body, SamplingConfig) | {"seed": one_value(body, body.SEEDS)}
    if body.top_k == -1:
        changes["top_k"] = 0
    if body.logit_bias is not None:
        changes["logit_bias"] = _logit_bias(body.logit_bias, model)
    changes = {name: value for name, value in changes.items() if value is not None}
    sampling = dataclasses.replace(RequestSampling.from_config(model.decode), **changes)
    if "seed" not in changes and sampling.temperature:
        # Without a seed, equal requests get different outputs.
        sampling = dataclasses.replace(sampling, seed=secrets.randbelow(INT64_MAX + 1))
    return sampling


def _logit_bias(
    biases: dict[str, float | None], model: ServedModel
) -> tuple[tuple[int, float], ...]:
    pairs = {}
    for name, bias in biases.items():
        token = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else None
        if token is None or token >= model.vocab_size:
            message = f"logit_bias.{name}: expected a token id below {model.vocab_size}"
            raise RequestError(message, param="logit_bias")
        pairs[token] = bias or 0.0
    return tuple(sorted(pairs.items()))


def _token_rules(body: SamplingBody, model: ServedModel) -> TokenRules | None:
    """Returns the rules of vLLM's `allowed_token_ids` and `bad_words`; None if there are none."""
    allowed, words = getattr(body, "allowed_token_ids", None), getattr(body, "bad_words", ())
    if allowed is None and not words:
        return None
    name = "bad_words" if words else "allowed_token_ids"
    if allowed is not None:
        allowed = token_ids(allowed, "allowed_token_ids", model)
        if not allowed:
            problem = "allowed_token_ids: empty; give at least one token"
            raise RequestError(problem, param="allowed_token_ids")
    try:
        model.vocabulary()  # Their masks need the programs of grammars.
        bad = itertools.chain.from_iterable(_spellings(word, model) for word in words)
        return TokenRules(allowed, tuple(dict.fromkeys(bad)))
    except errors.InputError as error:
        raise unsupported(name, str(error)) from error


def _spellings(word: str, model: ServedModel) -> Iterator[tuple[int, ...]]:
    """Yields the tokens of a word at the beginning of a text, and of one after a space.

    As in vLLM, the latter counts if it has as many tokens and another first one.
    """
    encode = functools.partial(model.tokenizer.encode, add_special_tokens=False)
    first, spaced = encode(word), encode(f" {word.lstrip()}")
    yield tuple(first)
    if len(spaced) == len(first) and spaced[0] != first[0]:
        yield tuple(spaced)


def _stop_ids(body: SamplingBody, model: ServedModel) -> tuple[int, ...]:
    ids = token_ids(body.stop_token_ids, "stop_token_ids", model)
    if len(set(ids)) > NUM_STOP_IDS:
        raise RequestError(
            f"stop_token_ids: expected at most {NUM_STOP_IDS}", param="stop_token_ids"
        )
    ignore_eos = model.decode.ignore_eos if body.ignore_eos is None else body.ignore_eos
    eos_ids = () if ignore_eos else model.eos_ids
    return tuple(sorted({*eos_ids, *model.decode.stop_ids, *ids}))
