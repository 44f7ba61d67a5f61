"""One output as its client sees it: text, where it ends, log-probabilities, and its statistics."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from dflash.inference.request import Completion, Request, Tokens
from dflash.serving.ask import Ask, Model
from dflash.serving.stops import StopFinder
from dflash.text.tokenizer import IncrementalDecoder

FinishReason = Literal["stop", "length", "error", "abort"]

# Of a piece of text: an accepted draft, the target's own, or a draft that was refused.
Origin = Literal["drafted", "own", "refused"]


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A token, its text where it stands, and how likely it was.

    Attributes:
      id: of the token.
      text: what it adds to the output.
      logprob: log-probability under the target's own logits.
      top: (id, log-probability) of the likeliest tokens in its place.
    """

    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Delta:
    """What an output has gained.

    Attributes:
      text: that is certain now.
      tokens: with log-probabilities, where these are asked for.
      pieces: the same text in pieces, each with its origin, and among them refused drafts, which
        are no part of the text.
    """

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    pieces: tuple[tuple[str, Origin], ...] = ()

    def then(self, later: "Delta") -> "Delta":
        """Both, as one."""
        tokens, pieces = self.tokens + later.tokens, self.pieces + later.pieces
        return Delta(self.text + later.text, tokens, pieces)


@dataclasses.dataclass
class Statistics:
    """What an output was made of.

    Attributes:
      cycles: in which the target verified.
      drafted: tokens that were proposed.
      accepted: drafted tokens among the output's.
      cached_tokens: of the prompt, found in the prefix cache.
    """

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0

    @property
    def tau(self) -> float | None:
        """Tokens of a cycle; None where there was none."""
        return 1 + self.accepted / self.cycles if self.cycles else None


class Output:
    """Follows one request from its first event to its end.

    Attributes:
      index: place among the outputs of its HTTP request.
      request: what the engine was asked for.
      ids: the output's tokens, up to where it ends.
      text: all that the deltas said.
      finish_reason: None while it goes on.
      stop_reason: the stop string or token that ended it.
      statistics: so far.
    """

    def __init__(self, index: int, request: Request, ask: Ask, model: Model):
        """Starts without tokens.

        Args:
          index: place among the outputs of its HTTP request.
          request: what the engine was asked for.
          ask: what the client asked for.
          model: what answers.
        """
        self.index, self.request = index, request
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.statistics = Statistics()
        self._said: list[str] = []
        self._show, self._least, self._model = ask.show, ask.min_new_tokens, model
        self._words = IncrementalDecoder(model.tokenizer, special_tokens=ask.show.special_tokens)
        self._finder = StopFinder(ask.stop, include=ask.show.stop)
        self._pieces = _Pieces() if ask.show.drafts else None

    @property
    def text(self) -> str:
        """All that it said so far."""
        return "".join(self._said)

    @property
    def ended(self) -> bool:
        """Whether nothing is to come."""
        return self.finish_reason is not None

    def push(self, event: Tokens) -> Delta:
        """Takes newly committed tokens; a stop string among them ends the output."""
        said, tokens = [], []
        logprobs = event.logprobs if self._show.logprobs is not None else ()
        if not event.acceptance_lengths:
            self.statistics.cached_tokens = event.cached_tokens
        for place, (token, origin, refused) in enumerate(_with_origin(event)):
            self.ids.append(token)
            if self._pieces is not None and refused:
                self._pieces.add(self._words.fork().push(refused), "refused")
            text = self._words.push((token,))
            if self._pieces is not None:
                self._pieces.add(text, origin)
            # The text of tokens before the least number is out of reach for stop strings.
            free = len(self.ids) <= self._least
            said.append(text if free else self._finder.push(text))
            if logprobs:
                found = logprobs[place]
                top = tuple(zip(found.top_ids, found.top_logprobs, strict=True))
                tokens.append(TokenText(token, text, found.logprob, top))
            if self._finder.found is not None:
                self.finish_reason, self.stop_reason = "stop", self._finder.found
                break
        self._count(event)
        return self._delta("".join(said), tokens)

    def finish(self, done: Completion) -> Delta:
        """Takes the end; whatever was held back is said now."""
        if self.ended:
            return Delta()
        rest = self._words.flush()
        if self._pieces is not None:
            self._pieces.add(rest, "own")
        text = self._finder.push(rest, final=True)
        self.finish_reason = done.finish_reason
        if self._finder.found is not None:
            self.finish_reason, self.stop_reason = "stop", self._finder.found
        elif done.finish_reason == "stop":
            self.stop_reason = done.output_ids[-1]
        return self._delta(text, ())

    def _delta(self, text: str, tokens: Sequence[TokenText]) -> Delta:
        self._said.append(text)
        pieces = () if self._pieces is None else tuple(self._pieces.take(len(text)))
        return Delta(text, tuple(tokens), pieces)

    def _count(self, event: Tokens) -> None:
        lengths, sizes = event.acceptance_lengths, event.block_sizes
        self.statistics.cycles += len(lengths)
        self.statistics.drafted += sum(sizes) - len(sizes)
        self.statistics.accepted += sum(lengths) - len(lengths)


class _Pieces:
    """Text in pieces of one origin each, taken as far as it is said."""

    def __init__(self):
        self._waiting: list[tuple[str, Origin]] = []

    def add(self, text: str, origin: Origin) -> None:
        if text:
            self._waiting.append((text, origin))

    def take(self, size: int) -> Iterator[tuple[str, Origin]]:
        """The next `size` characters; neighbors of one origin together."""
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
    """Each token of an event, its origin, and the drafts that were refused in its favor.

    The last token of a cycle is the target's own.
    """
    ids = iter(event.ids)
    lengths = event.acceptance_lengths or (len(event.ids),)
    for length, refused in itertools.zip_longest(lengths, event.refused, fillvalue=()):
        for _ in range(length - 1):
            yield next(ids), "drafted", ()
        yield next(ids), "own", refused
