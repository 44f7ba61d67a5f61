"""Offline decoding: keeps the slots of an engine busy from a queue of prompts.

Host work between dispatches is kept to what the next dispatch needs (refilling slots); whatever a
caller does with the events, such as turning tokens to text, overlaps the next dispatch.
"""

import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from dflash import errors
from dflash.inference.engine import Engine, Slot
from dflash.inference.pages import PagePool
from dflash.inference.state import DecodeState


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode; `index` numbers it in its run and, with the seed, fixes its noise."""

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Newly committed tokens of one request; `index` is the request's."""

    index: int
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      index: the request's.
      output_ids: without the prompt.
      finish_reason: "stop" (a stop token, which is the last output id) or "length".
      acceptance_lengths: tokens committed in each cycle, bonus included. The first output token
        comes from the prefill, so they sum to len(output_ids) - 1.
      block_sizes: rows that the target verified in each of these cycles.
      prefill_ms: from the prompt's dispatch to its first token.
      decode_ms: from the first token to the last, on the wall clock.
      decode_clock_s: seconds that all dispatches had taken by then, whoever was in the slots.
      finished_at: when the last token was there, in seconds of time.perf_counter.
    """

    index: int
    output_ids: tuple[int, ...]
    finish_reason: str
    acceptance_lengths: tuple[int, ...]
    block_sizes: tuple[int, ...]
    prefill_ms: float
    decode_ms: float
    decode_clock_s: float
    finished_at: float

    @property
    def tau(self) -> float:
        """Mean acceptance length; nan if there was no cycle."""
        lengths = self.acceptance_lengths
        return sum(lengths) / len(lengths) if lengths else float("nan")


@dataclasses.dataclass
class _Running:
    """A request in a slot."""

    request: Request
    slot: Slot
    first_token_at: float
    prefill_ms: float
    output_ids: list[int]
    acceptance_lengths: list[int]
    block_sizes: list[int]


def check_request(request: Request, max_length: int, vocab_size: int) -> None:
    """Raises InputError if a request cannot be decoded."""
    where = f"prompt {request.index}"
    if not request.prompt:
        raise errors.InputError(f"{where}: empty; give at least one token")
    wrong = [token for token in request.prompt if not 0 <= token < vocab_size]
    if wrong:
        raise errors.InputError(
            f"{where}: token id {wrong[0]} is outside the vocabulary of {vocab_size}"
        )
    wanted = len(request.prompt) + request.max_new_tokens
    if wanted > max_length:
        raise errors.InputError(
            f"{where}: {len(request.prompt)} prompt tokens + {request.max_new_tokens} new ones = "
            f"{wanted}, but the cache holds {max_length}; raise decode.max_length or shorten one"
        )


def decode(engine: Engine, requests: Iterable[Request]) -> Iterator[Tokens | Completion]:
    """Decodes requests in order of arrival, as many at a time as there are slots.

    Yields:
      Tokens as they are committed, and one Completion per request after its last Tokens.
    Raises:
      InputError: a request that cannot be decoded; before any other has begun.
    """
    requests = list(requests)
    for request in requests:
        check_request(request, engine.layout.max_length, engine.vocab_size)
    yield from _Offline(engine, requests).events()


class _Offline:
    """The loop of `decode`: the queue, the slots in use and the device state between dispatches."""

    def __init__(self, engine: Engine, requests: Iterable[Request]):
        layout = engine.layout
        self.engine = engine
        self.queue = collections.deque(requests)
        self.pool = PagePool(layout.num_shares, layout.pages_per_share)
        self.running: dict[int, _Running] = {}
        # Empty caches are there before the clock of the first prompt starts.
        self.state: DecodeState = jax.block_until_ready(engine.new_state())
        self.clock_s = 0.0

    def events(self) -> Iterator[Tokens | Completion]:
        events = self.refill()
        while self.running:
            begin = time.perf_counter()
            self.state, report = self.engine.generate(self.state)
            yield from events  # of the dispatch before; the device is busy with this one
            report = jax.device_get(report)
            end = time.perf_counter()
            self.clock_s += end - begin
            events = self.collect(report, begin, end)
            events += self.refill()
        self.engine.retire(self.state)
        yield from events

    def refill(self) -> list[Tokens | Completion]:
        """Prefills queued requests into free slots while there are pages for them."""
        events: list[Tokens | Completion] = []
        layout = self.engine.layout
        for index in range(layout.batch_size):
            while index not in self.running and self.queue:
                request = self.queue[0]
                limit = len(request.prompt) + request.max_new_tokens
                pages = self.pool.take(layout.share_of(index), layout.pages_for(limit))
                if pages is None:
                    break
                self.queue.popleft()
                events += self.start(request, Slot(index, pages), limit)
        return events

    def start(self, request: Request, slot: Slot, limit: int) -> list[Tokens | Completion]:
        begin = time.perf_counter()
        prefix = self.engine.prefill(request.prompt, request.index)
        first = int(jax.device_get(prefix.anchor)[0])
        now = time.perf_counter()
        self.state = self.engine.insert(self.state, prefix, slot, limit)
        run = _Running(request, slot, now, 1e3 * (now - begin), [first], [], [])
        self.running[slot.index] = run
        events: list[Tokens | Completion] = [Tokens(request.index, (first,))]
        if request.max_new_tokens == 1 or first in self.engine.stop_ids:
            events.append(self.finish(run, now))
        return events

    def collect(self, report, begin: float, end: float) -> list[Tokens | Completion]:
        """Hands one dispatch's tokens to their requests; `begin` and `end` in seconds."""
        events: list[Tokens | Completion] = []
        cycles = int(report.cycles)
        counts = report.num_committed[:cycles]
        for index, run in list(self.running.items()):
            fresh: list[int] = []
            for i in np.flatnonzero(counts[:, index]):
                count = int(counts[i, index])
                fresh += report.tokens[i, index, :count].tolist()
                run.acceptance_lengths.append(count)
                run.block_sizes.append(int(report.block_sizes[i]))
            run.output_ids += fresh
            events.append(Tokens(run.request.index, tuple(fresh)))
            if not report.active[index]:
                share = np.count_nonzero(counts[:, index]) / cycles
                events.append(self.finish(run, begin + share * (end - begin)))
        return events

    def finish(self, run: _Running, now: float) -> Completion:
        layout, slot = self.engine.layout, run.slot
        del self.running[slot.index]
        self.state = self.engine.release(self.state, slot.index)
        self.pool.give_back(layout.share_of(slot.index), slot.pages)
        stopped = run.output_ids[-1] in self.engine.stop_ids
        return Completion(
            index=run.request.index,
            output_ids=tuple(run.output_ids),
            finish_reason="stop" if stopped else "length",
            acceptance_lengths=tuple(run.acceptance_lengths),
            block_sizes=tuple(run.block_sizes),
            prefill_ms=run.prefill_ms,
            decode_ms=1e3 * (now - run.first_token_at),
            decode_clock_s=self.clock_s,
            finished_at=now,
        )


def max_length(requests: Sequence[Request]) -> int:
    """Tokens that the longest of the requests may come to."""
    return max(len(request.prompt) + request.max_new_tokens for request in requests)
