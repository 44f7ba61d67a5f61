"""Requests in flight, and the work of the device whose results the host has not read."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from dflash import errors
from dflash.inference.cycle.state import Report
from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.request import PromptToken, Request, RequestOutput, TokenLogprobs
from dflash.text.grammar import Matcher
from dflash.text.token_rules import RulesMatcher


@dataclasses.dataclass(eq=False)
class ActiveRequest:
    """Request in flight and its progress; it holds a slot and pages from prefill to its end.

    Attributes:
      submitted_at: Time of submission, in seconds of time.perf_counter.
      matcher: Matcher of its grammar and rules, which has consumed all of the output; None without
        these.
      constraints: Constraints on its first token; None for an unconstrained request.
      prompt_tokens: Tokens of its prompt with log-probabilities, if these are requested.
      acceptance_lengths: Tokens committed by each cycle.
      block_sizes: Rows verified in each cycle.
      slot: Index of its slot; None while it waits and after its end.
      pages: Its pages of the target's cache.
      prefilled: Number of context tokens in these pages, until it decodes.
      published: Number of its pages that the prefix cache contains.
      touched: Whether the drafter has observed any of its tokens in the prefill slot.
      queued_ms: Time from submission to the first prefill, in milliseconds; None before that.
      first_token_at: Time of the first token, in seconds of time.perf_counter.
      prefill_ms: Time of its prefill chunks, in milliseconds.
      preemptions: Number of times that it lost its slot.
      cached_tokens: Prompt tokens found in the prefix cache.
      recomputed: Whether it was computed again after non-finite logits that it did not explain.
      error: Error that ends this request alone; None if it has not failed.
    """

    request: Request
    submitted_at: float
    matcher: Matcher | RulesMatcher | None = None
    constraints: FirstTokenConstraints | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    block_sizes: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    pages: tuple[int, ...] = ()
    prefilled: int = 0
    published: int = 0
    touched: bool = False
    queued_ms: float | None = None
    first_token_at: float = 0.0
    prefill_ms: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    recomputed: bool = False
    error: errors.UserError | None = None
    prompt_tokens: tuple[PromptToken, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Committed tokens of prompt and output."""
        return (*self.request.prompt, *self.output_ids)

    @property
    def length(self) -> int:
        """Number of committed tokens of prompt and output."""
        return len(self.request.prompt) + len(self.output_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends newly committed tokens."""
        self.output_ids += tokens
        if self.matcher:
            with self.failing():
                self.matcher.advance([id for id in tokens if id not in self.request.stop_ids])

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Turns an exception of the request's grammar into the request's own error."""
        try:
            yield
        except Exception as error:
            self.error = grammar_error(self.request, error)

    @property
    def finish_reason(self) -> str:
        """Reason of the request's end; see `RequestOutput`."""
        if self.error is not None:
            return "error"
        if self.output_ids[-1] not in self.request.stop_ids:
            return "length"
        return "error" if self.matcher and not self.matcher.may_end else "stop"

    @property
    def context(self) -> int:
        """Number of tokens to prefill: the prompt, or all tokens before a known anchor."""
        return self.length - bool(self.output_ids)

    def completion(self, now: float, clock_s: float) -> RequestOutput:
        """Returns the completion of the request.

        Args:
          now: Time of its last token, in seconds of time.perf_counter.
          clock_s: Total time of all dispatches of cycles so far, in seconds.
        """
        return RequestOutput(
            id=self.request.id,
            output_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            acceptance_lengths=tuple(self.acceptance_lengths),
            block_sizes=tuple(self.block_sizes),
            prefill_ms=self.prefill_ms,
            decode_ms=1e3 * (now - self.first_token_at) if self.output_ids else 0.0,
            decode_clock_s=clock_s,
            finished_at=now,
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
            queued_ms=self.queued_ms,
            error=self.error,
        )


def grammar_error(request: Request, error: Exception) -> errors.InputError:
    """Returns the error of a request whose grammar raised an exception."""
    return errors.InputError(f"prompt {request.id}: its grammar cannot be followed: {error}")


@dataclasses.dataclass(frozen=True)
class PendingPrefill:
    """Prefill chunks that the device was given.

    Attributes:
      enqueued_at: Time of the call, in seconds of time.perf_counter.
      requests: Requests by prefill slot, each with whether its prompt is complete.
      anchors: Token after each chunk, int32 [n].
      logprobs: Log-probabilities of these tokens, [n].
      others_wait: Whether running requests wait meanwhile.
    """

    enqueued_at: float
    requests: dict[int, tuple[ActiveRequest, bool]]
    anchors: jax.Array
    logprobs: Logprobs
    others_wait: bool


@dataclasses.dataclass(frozen=True)
class PendingCycles:
    """Dispatch of cycles that the device was given.

    Attributes:
      enqueued_at: Time of the call, in seconds of time.perf_counter.
      queued: Whether requests waited for a slot.
    """

    enqueued_at: float
    reports: list[Report]
    queued: bool


def count_cycles(report: Report) -> dict[str, int]:
    """Returns the counts of a dispatch's cycles by name; see `SchedulerStats`."""
    cycles = int(report.cycles)
    counts = {"cycles": cycles, "slot_cycles": np.count_nonzero(report.num_committed[:cycles])}
    counts |= {name: number[:cycles].sum() for name, number in report.events.items()}
    return {name: int(count) for name, count in counts.items()}


def committed(report: Report, slot: int, cycles: np.ndarray) -> list[int]:
    """Returns the tokens that a slot committed in these cycles."""
    counts = report.num_committed[:, slot]
    return [token for i in cycles for token in report.tokens[i, slot, : counts[i]].tolist()]


def rejected(report: Report, slot: int, cycles: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Returns the rejected drafts of a slot, by cycle."""
    rows = (report.rejected[i, slot] for i in cycles)
    return tuple(tuple(drafts[drafts >= 0].tolist()) for drafts in rows)


def committed_logprobs(
    report: Report, slot: int, cycles: np.ndarray, count: int | None
) -> tuple[TokenLogprobs, ...]:
    """Returns the log-probabilities of the tokens that a slot committed in these cycles.

    Args:
      count: Number of likeliest tokens to report; None returns nothing.
    """
    if count is None:
        return ()
    counts = report.num_committed[:, slot]
    by_cycle = (report.logprobs.of((i, slot), counts[i], count) for i in cycles)
    return tuple(token for tokens in by_cycle for token in tokens)
