"""Constraints on outputs: JSON schemas, regular expressions, and context-free grammars."""

import asyncio
import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable

from dflash import errors
from dflash.serving.fair_queue import FairQueue
from dflash.serving.validation import RequestError
from dflash.text import grammar
from dflash.text.grammar import Grammar, Kind, Vocabulary

_WORKERS = 2  # Grammars that are compiled at the same time.
# Further grammars of a client, each of which may take `grammar_compiler.COMPILE_SECONDS`.
_MAX_WAITING = 8


@dataclasses.dataclass(frozen=True)
class StructuredOutput:
    """Constraint in source form; an error may name one of its `parts` instead of the whole."""

    kind: Kind
    source: str
    param: str
    parts: tuple["StructuredOutput", ...] = ()

    def compile(
        self, vocabulary: Callable[[], Vocabulary], is_abandoned: Callable[[], bool]
    ) -> Grammar:
        """Compiles the constraint, which may take seconds; raises RequestError if it fails."""
        try:
            return grammar.compiled(Grammar(self.kind, self.source, vocabulary()), is_abandoned)
        except errors.InputError as error:
            for part in self.parts:
                part.compile(vocabulary, is_abandoned)
            raise RequestError(f"{self.param}: {error}", param=self.param) from error
        except errors.UserError as error:  # The reason does not lie in the grammar.
            raise _unavailable(f"{self.param}: {error}", 503) from error


class GrammarQueue:
    """Compiles the grammars of requests, a few at a time; used on the event loop.

    As with slots, clients take turns, so the grammars of one do not hold up those of others.
    """

    def __init__(self):
        """Creates the queue; its threads start with the first grammars."""
        self._pool = concurrent.futures.ThreadPoolExecutor(_WORKERS, "grammar")
        self._queue = FairQueue(_WORKERS)
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._ids = itertools.count()

    async def compile(
        self, structure: StructuredOutput, vocabulary: Callable[[], Vocabulary], client: str = ""
    ) -> Grammar:
        """Compiles a constraint in its turn; cancelling this ends the work, too.

        Raises:
          RequestError: The constraint cannot be used, or too many others of the client wait.
        """
        if self._queue.count(client) >= _WORKERS + _MAX_WAITING:
            waiting = f"{_MAX_WAITING} other grammars wait to be compiled; try again later"
            raise _unavailable(f"{structure.param}: {waiting}", 429)
        loop, abandoned, id = asyncio.get_running_loop(), threading.Event(), next(self._ids)
        self._turns[id] = loop.create_future()
        self._queue.add(id, (client,))
        try:
            self._start()
            await self._turns[id]
            return await loop.run_in_executor(
                self._pool, structure.compile, vocabulary, abandoned.is_set
            )
        finally:
            abandoned.set()
            del self._turns[id]
            self._queue.remove(id)
            self._start()

    def _start(self) -> None:
        for id in self._queue.take():
            if not self._turns[id].done():  # else it is cancelled, and about to leave
                self._turns[id].set_result(None)


def _unavailable(message: str, status: int) -> RequestError:
    code = "queue_full" if status == 429 else "unavailable"
    return RequestError(message, status=status, code=code, retry_after_s=1)
