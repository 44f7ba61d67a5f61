"""Output of one request: text, finish reason, log-probabilities, and statistics."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from dflash.inference.request import Completion, Request, Tokens
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.stops import StopFinder
from dflash.text.tokenizer import IncrementalDecoder, Tokenizer

FinishReason = Literal["stop", "length", "error", "abort"]

# Origin of a piece of text, reported with show_drafts: "drafted" is an accepted draft, "own" a
# token that the target itself supplied, and "refused" a rejected draft. Clients read these names.
Origin = Literal["drafted", "own", "refused"]


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A token of an output, with its text and log-probabilities.

    Attributes:
      id: Token id.
      text: Text that the token adds to the output.
      logprob: Log-probability under the target's raw logits.
      top: (id, log-probability) of the likeliest tokens at this position.
    """

    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class OutputDelta:
    """Part of an output that has become final.

    Attributes:
      text: Final text.
      tokens: Tokens with log-probabilities, if the request asks for them.
      pieces: (text, origin) pairs of the same text, in which rejected drafts are included.
    """

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    pieces: tuple[tuple[str, Origin], ...] = ()

    def then(self, later: "OutputDelta") -> "OutputDelta":
        """Returns the concatenation of this delta and a later one."""
        tokens, pieces = self.tokens + later.tokens, self.pieces + later.pieces
        return OutputDelta(self.text + later.text, tokens, pieces)


@dataclasses.dataclass
class OutputStatistics:
    """Counts of one output.

    Attributes:
      cycles: Decode cycles.
      drafted: Drafted tokens.
      accepted: Output tokens that are accepted drafts.
      committed: Output tokens of all cycles.
      cached_tokens: Prompt tokens found in the prefix cache.
      decode_ms: Engine's time from the first token to the last, in milliseconds; None until then.
    """

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    cached_tokens: int = 0
    decode_ms: float | None = None

    @property
    def tau(self) -> float | None:
        """Mean acceptance length (τ); None if there was no cycle."""
        return self.committed / self.cycles if self.cycles else None


class Output:
    """Text and statistics of one request, updated by its events.

    Attributes:
      index: Position among the outputs of its HTTP request.
      request: Request as submitted to the engine.
      ids: Output tokens, up to the end of the output.
      text: Concatenated text of all deltas.
      finish_reason: Reason why the output ended; None until it ends.
      stop_reason: Stop string or token that ended the output; None otherwise.
      statistics: Counts so far.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        completion_request: CompletionRequest,
        tokenizer: Tokenizer,
    ):
        """Creates an output without tokens.

        Args:
          index: Position among the outputs of its HTTP request.
          request: Request as submitted to the engine.
          completion_request: Request as the client sent it.
          tokenizer: Tokenizer of the target.
        """
        self.index, self.request = index, request
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.statistics = OutputStatistics()
        self._texts: list[str] = []
        self._min_new_tokens = completion_request.min_new_tokens
        options = completion_request.options
        self._has_logprobs = options.logprobs is not None
        self._decoder = IncrementalDecoder(
            tokenizer, prompt=request.prompt, special_tokens=options.special_tokens
        )
        self._finder = StopFinder(completion_request.stop, include=options.stop)
        # Stop tokens whose text is not part of the output.
        self._silent = frozenset(() if options.stop else request.stop_ids)
        # Special tokens that the text leaves out, and that some stop string contains.
        skipped = {} if options.special_tokens else tokenizer.special_spellings
        self._hidden = {
            token: spelling
            for token, spelling in skipped.items()
            if any(spelling in stop for stop in completion_request.stop)
        }
        self._pieces = _Pieces() if options.drafts else None

    @property
    def text(self) -> str:
        """Text so far."""
        return "".join(self._texts)

    @property
    def ended(self) -> bool:
        """True once the output is complete."""
        return self.finish_reason is not None

    def push(self, event: Tokens) -> OutputDelta:
        """Appends newly committed tokens; a stop string in their text ends the output."""
        texts, tokens, before = [], [], len(self.ids)
        logprobs = event.logprobs if self._has_logprobs else ()
        if not event.acceptance_lengths:
            self.statistics.cached_tokens = event.cached_tokens
        for place, (token, origin, rejected) in enumerate(_with_origin(event)):
            self.ids.append(token)
            if self._pieces is not None and rejected:
                # Decode rejected drafts on a copy, so that they do not affect the output.
                self._pieces.add(self._decoder.fork().push(rejected), "refused")
            text = "" if token in self._silent else self._decoder.push((token,))
            if self._pieces is not None:
                self._pieces.add(text, origin)
            hidden = self._hidden.get(token, "")
            texts.append(self._finder.push(text, hidden=hidden, exempt=self._is_exempt))
            if logprobs:
                likeliest = logprobs[place]
                top = tuple(zip(likeliest.top_ids, likeliest.top_logprobs, strict=True))
                tokens.append(TokenText(token, text, likeliest.logprob, top))
            if self._finder.found is not None:
                self.finish_reason, self.stop_reason = "stop", self._finder.found
                break
        self._count(event.first(len(self.ids) - before))
        return self._delta("".join(texts), tokens)

    def finish(self, done: Completion) -> OutputDelta:
        """Ends the output, and returns the text that was held back until now."""
        if self.ended:
            return OutputDelta()
        self.statistics.decode_ms = done.decode_ms
        remainder = self._decoder.flush()
        if self._pieces is not None:
            self._pieces.add(remainder, "own")
        text = self._finder.push(remainder, exempt=self._is_exempt, final=True)
        self.finish_reason = done.finish_reason
        if self._finder.found is not None:
            self.finish_reason, self.stop_reason = "stop", self._finder.found
        elif done.finish_reason == "stop":
            self.stop_reason = done.output_ids[-1]
        return self._delta(text, ())

    @property
    def _is_exempt(self) -> bool:
        """True while the output is too short for a stop string to end it."""
        return len(self.ids) <= self._min_new_tokens

    def _delta(self, text: str, tokens: Sequence[TokenText]) -> OutputDelta:
        self._texts.append(text)
        pieces = () if self._pieces is None else tuple(self._pieces.take(len(text)))
        return OutputDelta(text, tuple(tokens), pieces)

    def _count(self, event: Tokens) -> None:
        lengths, sizes = event.acceptance_lengths, event.block_sizes
        self.statistics.cycles += len(lengths)
        self.statistics.drafted += sum(sizes) - len(sizes)
        self.statistics.accepted += sum(event.accepted)
        self.statistics.committed += sum(lengths)


class _Pieces:
    """Queue of (text, origin) pairs whose text is not final yet."""

    def __init__(self):
        self._waiting: list[tuple[str, Origin]] = []

    def add(self, text: str, origin: Origin) -> None:
        if text:
            self._waiting.append((text, origin))

    def take(self, size: int) -> Iterator[tuple[str, Origin]]:
        """Removes `size` characters and yields them; merges neighbors of the same origin."""
        run: tuple[str, Origin] = "", "own"
        while size and self._waiting:
            text, origin = self._waiting.pop(0)
            if origin != "refused":
                if len(text) > size:
                    self._waiting.insert(0, (text[size:], origin))
                    text = text[:size]
                size -= len(text)
            if run[0] and origin != run[1]:
                yield run
                run = "", origin
            run = run[0] + text, origin
        if run[0]:
            yield run


def _with_origin(event: Tokens) -> Iterator[tuple[int, Origin, tuple[int, ...]]]:
    """Yields each token of an event, its origin, and the drafts that were rejected in its favor.

    The last token of each cycle is the one that the target itself supplied, unless the output ended
    within the draft.
    """
    ids = iter(event.ids)
    rejected = event.rejected or ((),) * len(event.accepted)
    cycles = zip(event.acceptance_lengths, event.accepted, rejected, strict=True)
    for length, accepted, drafts in cycles:
        for token in itertools.islice(ids, accepted):
            yield token, "drafted", ()
        for token in itertools.islice(ids, length - accepted):
            yield token, "own", drafts
    for token in ids:  # The first token, which no cycle committed.
        yield token, "own", ()
