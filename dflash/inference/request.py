"""Requests to the engine (prompt, sampling, stopping), and the events that answer them.

`inference/logits/controls.py` defines how each field changes the logits, and in which order.
"""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Iterable
from typing import NamedTuple

from dflash import errors
from dflash.config.schema import FLOAT32_MAX, INT32_MAX, SamplingConfig, option, subset
from dflash.text.grammar import Grammar, Matcher
from dflash.text.token_rules import RulesMatcher, TokenRules

MAX_LOGPROBS = 20  # Most alternatives reported per output token.
MAX_BIASED = 300  # Most tokens that a request may bias.


@dataclasses.dataclass(frozen=True)
class RequestSampling(SamplingConfig):
    """Sampling parameters of one sequence; see `dflash.Sampling` for those of the base class.

    Attributes:
      sequence: Number of the sequence under this seed. Noise depends only on these two numbers.
      logit_bias: (token, bias) pairs; each bias is added to its token's logit.
    """

    sequence: int = option(0, minimum=0)
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_config(cls, config: SamplingConfig, sequence: int = 0) -> "RequestSampling":
        """Returns the config's sampling parameters for sequence number `sequence` of the run."""
        return cls(**subset(config, SamplingConfig), sequence=sequence)


class CacheGroup(NamedTuple):
    """Part of the prefix cache: requests share cached pages only within their group.

    Attributes:
      adapter: Number of their adapter, on which cached rows depend.
    """

    salt: str = ""
    adapter: int = 0


SHARED = CacheGroup()


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompt to decode, with its sampling and stopping parameters.

    No value is compiled into a program, so one set of programs serves all requests.

    Attributes:
      id: Identifier chosen by the caller, unique among the requests in flight.
      prompt: Token ids, at least one.
      max_new_tokens: Number of output tokens at which the sequence ends.
      stop_ids: Tokens that end the sequence, at most as many as the engine supports.
      min_new_tokens: Number of output tokens before which no stop token is drawn.
      logprobs: Number of the target's likeliest tokens to report beside each output token, 0 to
        MAX_LOGPROBS; None reports nothing.
      grammar: Grammar that the whole output must match; None leaves it unconstrained.
      token_rules: Tokens and sequences of tokens that the output may not have; None for none.
      rejected: Whether to report rejected drafts.
      cache_salt: Name of the part of the prefix cache to use; requests share cached pages only with
        those of the same salt.
      adapter: Number of the target's adapter to decode with, from 1; 0 for none.
      prompt_logprobs: Number of the likeliest tokens to report beside each token of the prompt, 0
        to MAX_LOGPROBS; None reports nothing.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: RequestSampling = RequestSampling()
    stop_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    token_rules: TokenRules | None = None
    rejected: bool = False
    cache_salt: str = ""
    adapter: int = 0
    prompt_logprobs: int | None = None

    @property
    def cache_group(self) -> CacheGroup:
        """Returns the part of the prefix cache that the request uses."""
        return CacheGroup(self.cache_salt, self.adapter)

    @property
    def is_masked(self) -> bool:
        """Returns whether the host computes the tokens that may follow."""
        return self.grammar is not None or self.token_rules is not None

    def matcher(self, *, timed: bool = True) -> Matcher | RulesMatcher | None:
        """Returns a matcher at the beginning of the output; see `Grammar.matcher`."""
        inner = self.grammar and self.grammar.matcher(timed=timed)
        return inner if self.token_rules is None else self.token_rules.matcher(inner)

    @property
    def limit(self) -> int:
        """Returns the total length, prompt included, at which the sequence ends, in tokens."""
        return len(self.prompt) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one output token and of the likeliest alternatives.

    All but `sampled_logprob` are the log-softmax of the target's raw logits, before penalties,
    biases, masks and temperature, regardless of the distribution that the token was drawn from.

    Attributes:
      logprob: Log-probability of the output token.
      top_ids: Likeliest tokens, most likely first, as many as requested.
      top_logprobs: Log-probabilities of `top_ids`.
      sampled_logprob: Log-probability of the output token under the distribution that it was drawn
        from, after penalties, biases, masks, temperature, top-k, top-p and min-p; greedy decoding
        counts as a temperature of 1.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    sampled_logprob: float = math.nan


@dataclasses.dataclass(frozen=True)
class PromptToken:
    """Token of a prompt, with log-probabilities as in `TokenLogprobs`.

    Attributes:
      rank: Place of the token among all tokens by their log-probability, from 1.
    """

    id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Newly committed tokens of the request `id`.

    Attributes:
      ids: Tokens of one or more cycles, or the first token, which comes from the prefill.
      acceptance_lengths: Tokens committed by each cycle; empty for the first token.
      accepted: Accepted drafts among the tokens of each cycle: all but the last, which is the
        target's own, unless the output ended within the draft.
      logprobs: Log-probabilities of each token, if requested.
      block_sizes: Rows that the target verified in each cycle.
      rejected: Rejected drafts of each cycle in the order of drafting, if requested.
      cached_tokens: Prompt tokens taken from the prefix cache; set with the first token only.
      prompt_tokens: Tokens of the prompt after its first one, if their log-probabilities are
        requested; set with the first token only.
    """

    id: int
    ids: tuple[int, ...]
    acceptance_lengths: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    block_sizes: tuple[int, ...] = ()
    rejected: tuple[tuple[int, ...], ...] = ()
    cached_tokens: int = 0
    prompt_tokens: tuple[PromptToken, ...] = ()

    def first(self, count: int) -> "Tokens":
        """Returns the event of an output that ends with the first `count` of these tokens."""
        starts = itertools.accumulate(self.acceptance_lengths, initial=0)
        sizes = [count - start for start in starts if start < count][: len(self.acceptance_lengths)]
        return dataclasses.replace(
            self,
            ids=self.ids[:count],
            acceptance_lengths=tuple(map(min, self.acceptance_lengths, sizes)),
            accepted=tuple(map(min, self.accepted, sizes)),
            logprobs=self.logprobs[:count],
            block_sizes=self.block_sizes[: len(sizes)],
            rejected=self.rejected[: len(sizes)],
        )


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """Output and statistics of a finished request.

    Attributes:
      output_ids: Output tokens, without the prompt.
      finish_reason: "stop" (the last output id is a stop token), "length", or "error" (the output
        ended before it matched its grammar, or the request failed).
      acceptance_lengths: Tokens committed in each cycle, bonus included. The first output token
        comes from the prefill, so they sum to len(output_ids) - 1.
      block_sizes: Rows that the target verified in each cycle.
      prefill_ms: Time from the prompt's dispatch to its first token, in milliseconds, including
        prefills after preemptions.
      decode_ms: Wall-clock time from the first token to the last, in milliseconds.
      decode_clock_s: Total time of all dispatches of cycles at the end of this request, in seconds.
      finished_at: Time of the last token, in seconds of time.perf_counter.
      preemptions: Number of times that the request lost its slot because pages ran out.
      cached_tokens: Prompt tokens found in the prefix cache.
      queued_ms: Time from submission to the start of the first prefill, in milliseconds.
      error: Error that ended this request alone; None if it did not fail.
    """

    id: int
    output_ids: tuple[int, ...]
    finish_reason: str
    acceptance_lengths: tuple[int, ...]
    block_sizes: tuple[int, ...]
    prefill_ms: float
    decode_ms: float
    decode_clock_s: float
    finished_at: float
    preemptions: int = 0
    cached_tokens: int = 0
    queued_ms: float = 0.0
    error: errors.UserError | None = None

    @classmethod
    def failed(cls, request: Request, error: errors.UserError) -> "RequestOutput":
        """Returns the completion of a request that failed before it was prefilled."""
        now = time.perf_counter()
        return cls(request.id, (), "error", (), (), 0.0, 0.0, 0.0, now, error=error)

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Output tokens that are part of the text: all but the stop token."""
        return self.output_ids[:-1] if self.finish_reason == "stop" else self.output_ids


Event = Tokens | RequestOutput


def max_length(requests: Iterable[Request]) -> int:
    """Returns the length of the longest sequence in tokens, prompt and output together."""
    return max(request.limit for request in requests)


def check_request(
    request: Request,
    *,
    max_length: int,
    vocab_size: int,
    num_stop_ids: int | None = None,
    num_adapters: int = 0,
) -> None:
    """Raises if a request cannot be decoded.

    Args:
      max_length: Tokens that the cache holds per sequence.
      num_stop_ids: Stop ids that the engine supports; None skips this check.
    Raises:
      InputError: A field is out of range; the message names the request and the field.
    """
    where = f"prompt {request.id}"
    if not request.prompt:
        raise errors.InputError(f"{where}: empty; give at least one token")
    biased = tuple(token for token, _ in request.sampling.logit_bias)
    kinds = {"token id": request.prompt, "stop id": request.stop_ids, "logit_bias: token": biased}
    if request.token_rules is not None:
        kinds["allowed token"] = request.token_rules.allowed or ()
        kinds["bad token"] = tuple(itertools.chain(*request.token_rules.bad))
    for kind, ids in kinds.items():
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            raise errors.InputError(
                f"{where}: {kind} {wrong[0]} is outside the vocabulary of {vocab_size}"
            )
    if num_stop_ids is not None and len(set(request.stop_ids)) > num_stop_ids:
        raise errors.InputError(
            f"{where}: {len(set(request.stop_ids))} stop ids, but the engine was built for at "
            f"most {num_stop_ids}"
        )
    if not 0 <= request.adapter <= num_adapters:
        raise errors.InputError(
            f"{where}: adapter: {request.adapter}, but the target has {num_adapters}"
        )
    if request.max_new_tokens < 1:
        raise errors.InputError(
            f"{where}: max_new_tokens: {request.max_new_tokens}, expected 1 or more"
        )
    if request.limit > max_length:
        raise errors.InputError(
            f"{where}: {len(request.prompt)} prompt tokens + {request.max_new_tokens} new ones = "
            f"{request.limit}, but the cache holds {max_length}; raise decode.max_length or "
            "shorten one"
        )
    _check_sampling(where, request.sampling)
    _check_output(where, request)


def bounds_of(field: dataclasses.Field) -> tuple[float, float]:
    """Returns the inclusive bounds of a sampling parameter; math.inf means no upper bound."""
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if high is None:
        high = INT32_MAX if field.type is int else math.inf
    return low, high


def _check_sampling(where: str, sampling: RequestSampling) -> None:
    for field in dataclasses.fields(sampling):
        if not field.metadata:
            continue
        value, low, high = getattr(sampling, field.name), *bounds_of(field)
        if not (low <= value <= high and abs(value) <= FLOAT32_MAX):
            number = "" if field.type is int else "a number "
            high = FLOAT32_MAX if FLOAT32_MAX < value < math.inf else high
            words = f"of {low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
            expected = number + words if number else f"{low} to {high}"
            raise errors.InputError(f"{where}: {field.name}: {value}, expected {expected}")
    _check_bias(where, sampling.logit_bias)


def _check_bias(where: str, pairs: tuple[tuple[int, float], ...]) -> None:
    tokens = [token for token, _ in pairs]
    if len(pairs) > MAX_BIASED:
        raise errors.InputError(
            f"{where}: logit_bias: {len(pairs)} tokens, expected at most {MAX_BIASED}"
        )
    twice = [token for token, count in collections.Counter(tokens).items() if count > 1]
    if twice:
        raise errors.InputError(f"{where}: logit_bias: token {twice[0]} is given twice")
    for token, bias in pairs:
        if not -100.0 <= bias <= 100.0:
            raise errors.InputError(
                f"{where}: logit_bias: {bias} of token {token}, expected a number from -100 to 100"
            )


def _check_output(where: str, request: Request) -> None:
    if not 0 <= request.min_new_tokens <= request.max_new_tokens:
        raise errors.InputError(
            f"{where}: min_new_tokens: {request.min_new_tokens}, expected 0 to max_new_tokens, "
            f"which is {request.max_new_tokens}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(request, name)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise errors.InputError(f"{where}: {name}: {count}, expected 0 to {MAX_LOGPROBS}")
    if request.prompt_logprobs is not None and request.adapter:
        raise errors.InputError(f"{where}: prompt_logprobs: not supported with an adapter")
    if request.token_rules is not None:
        _check_rules(where, request.token_rules, has_stop=bool(request.stop_ids))
    if request.grammar is not None and not request.stop_ids:
        raise errors.InputError(
            f"{where}: an output that matches a grammar needs a stop token to end with; give "
            "decode.stop_ids, or leave decode.ignore_eos off"
        )


def _check_rules(where: str, rules: TokenRules, *, has_stop: bool) -> None:
    if rules.allowed == ():
        raise errors.InputError(f"{where}: allowed_token_ids: empty; give at least one token")
    if () in rules.bad:
        raise errors.InputError(f"{where}: bad_words: a word has no token")
    if rules.bad and rules.allowed is not None and not has_stop:
        raise errors.InputError(
            f"{where}: bad_words: together with allowed_token_ids, an output needs a stop token, "
            "since no token may be left"
        )
