"""What is asked of an engine: a prompt, how to sample, when to stop; and the events that answer.

What each field does to the logits, and in which order, is defined in `inference/controls.py`.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable

from dflash import errors
from dflash.config.schema import INT32_MAX, SamplingConfig, option
from dflash.text.grammar import Grammar

MAX_LOGPROBS = 20  # likeliest tokens that are reported beside the drawn one
MAX_BIASED = 300  # tokens that a request may bias


@dataclasses.dataclass(frozen=True)
class Sampling(SamplingConfig):
    """How the tokens of one sequence are drawn.

    Attributes:
      temperature: 0 is greedy.
      top_k: number of likeliest tokens to draw from; 0 is off.
      top_p: probability mass of the likeliest tokens to draw from; 1 is off.
      seed: of the noise, 0 to 2**32 - 1.
      sequence: number of the sequence under this seed. Noise depends on the two alone.
      min_p: smallest probability of a token to draw, as a share of the likeliest one's; 0 is off.
      presence_penalty: subtracted from the logits of tokens that the output holds; 0 is off.
      frequency_penalty: subtracted once for every time that the output holds the token; 0 is off.
      repetition_penalty: divides positive logits of tokens that the prompt or the output holds,
        and multiplies negative ones; 1 is off.
      logit_bias: (token, bias) pairs; each bias is added to its token's logit.
    """

    sequence: int = option(0, minimum=0)
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_config(cls, config: SamplingConfig, sequence: int = 0) -> "Sampling":
        """Returns the config's sampling parameters for sequence number `sequence` of the run."""
        names = [field.name for field in dataclasses.fields(SamplingConfig)]
        return cls(**{name: getattr(config, name) for name in names}, sequence=sequence)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode. Nothing of it is compiled into a program.

    Attributes:
      id: the caller's; no two requests in flight may share one.
      prompt: token ids, at least one.
      max_new_tokens: number of output tokens at which the sequence ends.
      sampling: how tokens are drawn.
      stop_ids: tokens that end the sequence; at most as many as the engine has room for.
      min_new_tokens: output tokens before which no stop token is drawn.
      logprobs: number of the target's likeliest tokens to report beside each output token, 0 to
        MAX_LOGPROBS; None reports nothing.
      grammar: what the output must match, and may end only where it does; None: anything.
      refused: whether to report drafts that were not accepted.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    refused: bool = False

    @property
    def limit(self) -> int:
        """Length of the whole sequence in tokens at which it ends."""
        return len(self.prompt) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """What the target thought of one output token and of others in its place.

    All are of the log-softmax of the target's raw logits: before penalties, biases, masks and
    temperature, whatever the token was drawn from.

    Attributes:
      logprob: of the output token.
      top_ids: the likeliest tokens, the best first, as many as the request asked for.
      top_logprobs: theirs.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Newly committed tokens of the request `id`.

    Attributes:
      id: the request's.
      ids: tokens of one or more cycles, or the first token, which comes from the prefill.
      acceptance_lengths: how many tokens each of these cycles has committed; none for the first.
        The last token of a cycle is the target's own, unless the output ended within the draft.
      logprobs: one for each of the ids, if the request asked for them.
      block_sizes: rows that the target verified in each of these cycles.
      refused: of each of these cycles the drafts that were not accepted, in the order in which they
        were drafted, if the request asked for them.
      cached_tokens: of the prompt, taken from the prefix cache; said with the first token.
    """

    id: int
    ids: tuple[int, ...]
    acceptance_lengths: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    block_sizes: tuple[int, ...] = ()
    refused: tuple[tuple[int, ...], ...] = ()
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      id: the request's.
      output_ids: without the prompt.
      finish_reason: "stop" (a stop token, which is the last output id), "length", or "error": the
        output could not be continued as its grammar demands, so it does not match.
      acceptance_lengths: tokens committed in each cycle, bonus included. The first output token
        comes from the prefill, so they sum to len(output_ids) - 1.
      block_sizes: rows that the target verified in each of these cycles.
      prefill_ms: from the prompt's dispatch to its first token, later prefills included.
      decode_ms: from the first token to the last, on the wall clock.
      decode_clock_s: seconds that dispatches of cycles had taken in total when it finished.
      finished_at: time of the last token, in seconds of time.perf_counter.
      preemptions: how often it lost its slot for want of pages and was prefilled again.
      cached_tokens: tokens of the prompt that the prefix cache already held.
      queued_ms: from its submission to the start of its first prefill.
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

    @property
    def tau(self) -> float:
        """Mean acceptance length; nan if there was no cycle."""
        lengths = self.acceptance_lengths
        return sum(lengths) / len(lengths) if lengths else float("nan")


Event = Tokens | Completion


def max_length(requests: Iterable[Request]) -> int:
    """Tokens of the longest of the sequences, prompt and output together."""
    return max(request.limit for request in requests)


def check_request(
    request: Request, *, max_length: int, vocab_size: int, num_stop_ids: int | None = None
) -> None:
    """Refuses what cannot be decoded.

    Args:
      max_length: tokens that the cache holds of a sequence.
      vocab_size: of the target.
      num_stop_ids: stop ids that the engine has room for; None: unknown yet.
    Raises:
      InputError: one line that names the request and what is wrong with it.
    """
    where = f"prompt {request.id}"
    if not request.prompt:
        raise errors.InputError(f"{where}: empty; give at least one token")
    biased = tuple(token for token, _ in request.sampling.logit_bias)
    kinds = {"token id": request.prompt, "stop id": request.stop_ids, "logit_bias: token": biased}
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
    """Returns the inclusive bounds of a sampling parameter; math.inf: no upper bound."""
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if high is None:
        high = INT32_MAX if field.type is int else math.inf
    return low, high


def _check_sampling(where: str, sampling: Sampling) -> None:
    for field in dataclasses.fields(sampling):
        if not field.metadata:
            continue
        value, low, high = getattr(sampling, field.name), *bounds_of(field)
        if not (low <= value <= high and math.isfinite(value)):
            number = "" if field.type is int else "a number "
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
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise errors.InputError(
            f"{where}: logprobs: {request.logprobs}, expected 0 to {MAX_LOGPROBS}"
        )
    if request.grammar is not None and not request.stop_ids:
        raise errors.InputError(
            f"{where}: an output that matches a grammar needs a stop token to end with; give "
            "decode.stop_ids, or leave decode.ignore_eos off"
        )
