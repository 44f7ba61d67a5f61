"""Output of one request: text, finish reason, log-probabilities, and statistics."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from dflash.inference.request import PromptToken, Request, RequestOutput, Tokens
from dflash.serving.completion_request import CompletionRequest
from dflash.text.chat_formats.reader import OutputPart, merged, unfinished
from dflash.text.tokenizer import IncrementalDecoder, Tokenizer

FinishReason = Literal["stop", "length", "tool_calls", "error", "abort"]

# Origin of a piece of text, reported with show_drafts: "drafted" is an accepted draft, "own" a
# token that the target itself supplied, and "refused" a rejected draft. Clients read these names.
Origin = Literal["drafted", "own", "refused"]


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A token of an output, with its text and log-probabilities.

    Attributes:
      logprob: Log-probability under the target's raw logits; None for the first token of a prompt.
      top: (id, log-probability) of the likeliest tokens at this position.
    """

    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class OutputDelta:
    """Part of an output that has become final.

    Attributes:
      tokens: Tokens with log-probabilities, if the request asks for them.
      pieces: (text, origin) pairs of the same text, in which rejected drafts are included.
      parts: Parts of the answer, if it is parsed; they may lag behind the text.
      is_last: Whether nothing else follows that arrived at the same time.
    """

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    pieces: tuple[tuple[str, Origin], ...] = ()
    parts: tuple[OutputPart, ...] = ()
    is_last: bool = True

    @property
    def is_empty(self) -> bool:
        """True if a parsed answer gets nothing from it, since its text is held back."""
        return not self.parts and not self.tokens

    def then(self, later: "OutputDelta") -> "OutputDelta":
        """Returns the concatenation of this delta and a later one."""
        tokens, pieces = self.tokens + later.tokens, self.pieces + later.pieces
        parts = merged(self.parts + later.parts)
        return OutputDelta(self.text + later.text, tokens, pieces, parts)

    def split(self) -> Iterator["OutputDelta"]:
        """Yields deltas with at most one part each, whose sum this delta is."""
        first, *rest = self.parts[:1], *((part,) for part in self.parts[1:])
        yield dataclasses.replace(self, parts=first, is_last=not rest)
        for place, part in enumerate(rest, 1):
            yield OutputDelta(parts=part, is_last=place == len(rest))


@dataclasses.dataclass
class OutputStatistics:
    """Counts of one output.

    Attributes:
      accepted: Output tokens that are accepted drafts.
      committed: Output tokens of all cycles.
      cached_tokens: Prompt tokens found in the prefix cache.
      accepted_drafts: Number of cycles that accepted each number of drafts, without cycles that
        drafted nothing.
      decode_ms: Engine's time from the first token to the last, in milliseconds; None until then.
    """

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    cached_tokens: int = 0
    accepted_drafts: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )
    decode_ms: float | None = None

    @property
    def tau(self) -> float | None:
        """Mean acceptance length (τ); None if there was no cycle."""
        return self.committed / self.cycles if self.cycles else None


class Output:
    """Text and statistics of one request, updated by its events; reasons are None until it ends."""

    def __init__(
        self,
        index: int,
        request: Request,
        completion_request: CompletionRequest,
        tokenizer: Tokenizer,
    ):
        """Creates an output without tokens."""
        self.index, self.request = index, request
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.statistics = OutputStatistics()
        self.prompt_tokens: tuple[PromptToken, ...] = ()
        self._texts: list[str] = []
        self._min_new_tokens = completion_request.min_new_tokens
        options = completion_request.options
        self._has_logprobs = options.logprobs is not None
        chat_format = completion_request.chat_format
        markers = chat_format.markers if chat_format else frozenset()
        self._parser = chat_format and chat_format.parser(completion_request.rules)
        self._has_calls = False
        special = options.special_tokens or bool(markers)
        self._decoder = IncrementalDecoder(tokenizer, prompt=request.prompt, special_tokens=special)
        self._finder = StopFinder(completion_request.stop, include=options.stop)
        # Special tokens that the text leaves out.
        spellings = {} if options.special_tokens else tokenizer.special_spellings
        skipped = {token: text for token, text in spellings.items() if text not in markers}
        # Tokens whose text is not part of the output: stop tokens, and what the decoder returns.
        silent = () if options.stop else request.stop_ids
        self._silent = frozenset((*silent, *skipped) if markers else silent)
        # Special tokens of these that some stop string contains.
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
            self.prompt_tokens = event.prompt_tokens
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
            if self._finder.stop is not None:
                self.finish_reason, self.stop_reason = "stop", self._finder.stop
                break
        self._count(event.first(len(self.ids) - before))
        return self._delta("".join(texts), tokens)

    def finish(self, done: RequestOutput) -> OutputDelta:
        """Ends the output, and returns the text that was held back until now."""
        if self.ended:
            return OutputDelta()
        self.statistics.decode_ms = done.decode_ms
        remainder = self._decoder.flush()
        if self._pieces is not None:
            self._pieces.add(remainder, "own")
        text = self._finder.push(remainder, exempt=self._is_exempt, final=True)
        self.finish_reason = done.finish_reason
        if self._finder.stop is not None:
            self.finish_reason, self.stop_reason = "stop", self._finder.stop
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
        parts = () if self._parser is None else self._parser.push(text, final=self.ended)
        self._has_calls = self._has_calls or any(part.kind == "call" for part in parts)
        if self._has_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return OutputDelta(text, tuple(tokens), pieces, parts)

    def _count(self, event: Tokens) -> None:
        lengths, sizes = event.acceptance_lengths, event.block_sizes
        self.statistics.cycles += len(lengths)
        self.statistics.drafted += sum(sizes) - len(sizes)
        self.statistics.accepted += sum(event.accepted)
        self.statistics.committed += sum(lengths)
        drafting = zip(event.accepted, sizes, strict=True)
        self.statistics.accepted_drafts.update(count for count, size in drafting if size > 1)


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


class StopFinder:
    """Incremental search that truncates a text at its first stop string, its `stop`.

    While the end of the text may be the beginning of a stop string, `push` holds it back. So text
    that `push` has returned is final.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """Creates a finder with an empty text."""
        self._stops, self._include = stops, include
        self._held, self._visible = "", b""  # Text that is held back; a byte 0 hides a character.
        self._exempt = 0  # Characters of `_held` with which no stop string may end.
        self.stop: str | None = None

    def push(
        self, text: str, *, hidden: str = "", exempt: bool = False, final: bool = False
    ) -> str:
        """Appends a piece of text and returns the text that is now final.

        Args:
          text: Next piece; ignored after a stop string.
          hidden: Text after it that stop strings match and that no result contains.
          exempt: Whether no stop string may end within this piece; one may begin there.
          final: Whether this is the last piece, so that nothing is held back.
        """
        if self.stop is not None:
            return ""
        visible = self._visible + b"\1" * len(text) + b"\0" * len(hidden)
        text = self._held + text + hidden
        if exempt:
            self._exempt = len(text)
        # Choose the stop string that ends first and, among those that end together, the longest.
        ends = [(end, -len(stop), stop) for stop in self._stops if (end := self._end(stop, text))]
        if ends:
            size, length, self.stop = min(ends)
            size += 0 if self._include else length
        else:
            size = len(text) - (0 if final else unfinished(text, self._stops))
        self._held, self._visible = text[size:], visible[size:]
        self._exempt = max(0, self._exempt - size)
        return "".join(itertools.compress(text[:size], visible))

    def _end(self, stop: str, text: str) -> int:
        """Returns where a stop string first ends in a text; 0 if it does not."""
        start = text.find(stop, max(0, self._exempt + 1 - len(stop)))
        return 0 if start < 0 else start + len(stop)
