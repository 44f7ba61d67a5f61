"""What the scheduler knows of a request in flight, and of what the device was given to do."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.logprobs import Logprobs
from dflash.inference.request import Request, TokenLogprobs
from dflash.inference.state import Report
from dflash.text.grammar import Matcher


@dataclasses.dataclass(eq=False)
class ActiveRequest:
    """A request and how far it has come; it holds a slot and pages from its prefill to its end.

    Attributes:
      slot: index of the slot; None while it waits, and once it has ended.
      pages: of the target's cache.
      prefilled: tokens of its context that are in them, until it decodes.
      published: pages that the prefix cache knows.
      touched: whether the drafter has seen anything of it in its lane.
      matcher: of its grammar; it has seen all of the output.
      asked: what it asks of its first token; None: nothing.
    """

    request: Request
    submitted_at: float
    matcher: Matcher | None = None
    asked: FirstTokenConstraints | None = None
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

    @property
    def text(self) -> tuple[int, ...]:
        """Committed tokens, prompt included."""
        return (*self.request.prompt, *self.output_ids)

    @property
    def length(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self.request.prompt) + len(self.output_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes newly committed tokens."""
        self.output_ids += tokens
        if self.matcher:
            self.matcher.advance([one for one in tokens if one not in self.request.stop_ids])

    @property
    def finish_reason(self) -> str:
        """See `Completion`."""
        if self.output_ids[-1] not in self.request.stop_ids:
            return "length"
        return "error" if self.matcher and not self.matcher.may_end else "stop"

    @property
    def context(self) -> int:
        """Tokens to prefill: the prompt, or all before the anchor where there is one already."""
        return self.length - bool(self.output_ids)


@dataclasses.dataclass(frozen=True)
class GivenPrefill:
    """A chunk that the device was given: by lane, its sequences and whether they are complete."""

    enqueued_at: float
    sequences: dict[int, tuple[ActiveRequest, bool]]
    anchors: jax.Array
    logprobs: Logprobs
    others_wait: bool  # whether sequences of the batch stand still meanwhile


@dataclasses.dataclass(frozen=True)
class GivenCycles:
    """A dispatch of cycles that the device was given."""

    enqueued_at: float
    reports: list[Report]
    queued: bool  # whether requests waited for a slot


def committed(report: Report, index: int, cycles: np.ndarray) -> list[int]:
    """What a slot has committed in these cycles."""
    counts = report.num_committed[:, index]
    return [token for i in cycles for token in report.tokens[i, index, : counts[i]].tolist()]


def refused(report: Report, index: int, cycles: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """The drafts of a slot that were not accepted, of each of these cycles."""
    found = (report.refused[i, index] for i in cycles)
    return tuple(tuple(drafts[drafts >= 0].tolist()) for drafts in found)


def committed_logprobs(
    report: Report, index: int, cycles: np.ndarray, wanted: int | None
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of what a slot has committed in these cycles, if it wants them."""
    if wanted is None:
        return ()
    counts = report.num_committed[:, index]
    found = (report.logprobs.of((i, index), counts[i], wanted) for i in cycles)
    return tuple(one for cycle in found for one in cycle)
