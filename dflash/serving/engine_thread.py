"""The thread that owns jax: commands come in, events go out, and nobody else touches a scheduler.

    submit, cancel, flush, profile, stop      from any thread; carried out between two dispatches

Over several processes the first one's commands are everybody's: each process hears them before it
enqueues the next programs, so all of them run the same ones.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax

from dflash.inference.engine import Engine
from dflash.inference.request import Event, Request, Sampling
from dflash.inference.scheduler import Scheduler, SchedulerStats
from dflash.parallel import distributed
from dflash.serving.backend import Backend
from dflash.text.grammar import Grammar, Vocabulary

# Other processes wait for a word of the first one; it speaks at least so often.
_HEARTBEAT_S = 5.0


@dataclasses.dataclass(frozen=True)
class Submit:
    """Puts a request into a track's queue."""

    mode: str
    request: Request


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Drops a request, if it is still there."""

    id: int


@dataclasses.dataclass(frozen=True)
class Flush:
    """Empties the prefix caches."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Begins a profiler trace in a directory; None ends it."""

    directory: str | None


@dataclasses.dataclass(frozen=True)
class Stop:
    """Ends the thread."""


Command = Submit | Cancel | Flush | Profile | Stop
# Dataclasses that process 0 may send to the others.
_MESSAGE_TYPES = (Submit, Cancel, Flush, Profile, Stop, Request, Sampling, Grammar)


class _StoppedEarly(Exception):
    """The server was asked to stop before it was ready."""


class Listener(Protocol):
    """Hears of what happens, on the engine's thread: each call has to return at once."""

    def ready(self, engines: Mapping[str, Engine]) -> None:
        """Everything is compiled; requests are served from now on."""

    def stepped(
        self, events: Sequence[Event], stats: Mapping[str, SchedulerStats], seconds: float
    ) -> None:
        """A step has taken `seconds` and brought events; the schedulers stand as `stats` say."""

    def stopped(self, error: BaseException | None) -> None:
        """The thread ends; `error`: it has failed, and answers nothing any more."""


class EngineThread(threading.Thread):
    """Runs a scheduler for each track; the only thread that uses jax."""

    def __init__(self, backend: Backend, listener: Listener):
        """Starts nothing yet.

        Args:
          tracks: are started on the thread.
          listener: hears of everything.
        """
        super().__init__(name="engine", daemon=True)
        self._backend, self._listener = backend, listener
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._schedulers: dict[str, Scheduler] = {}

    # --- from any thread ------------------------------------------------------------------------

    def put(self, command: Command) -> None:
        """Has a command carried out before the next step."""
        if isinstance(command, Stop):
            self._stopping.set()
        self._commands.put(command)

    # --- on the thread --------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until it is asked to stop, or until it fails."""
        try:
            engines = self._backend.start(self._go_on)
            self._schedulers = {name: Scheduler(engine) for name, engine in engines.items()}
            self._listener.ready(engines)
            while self._obey(self._heard()):
                self._step()
            for scheduler in self._schedulers.values():
                scheduler.close()
        except _StoppedEarly:
            self._listener.stopped(None)
        except BaseException as error:
            self._listener.stopped(error)
        else:
            self._listener.stopped(None)

    def _go_on(self) -> None:
        """Ends the start if it is no longer wanted; processes of a run all come to its end."""
        if self._stopping.is_set() and jax.process_count() == 1:
            raise _StoppedEarly

    def _step(self) -> None:
        begin = time.perf_counter()
        busy = [scheduler for scheduler in self._schedulers.values() if not scheduler.idle]
        events = [event for scheduler in busy for event in scheduler.step()]
        seconds = time.perf_counter() - begin if busy else 0.0
        stats = {name: scheduler.stats() for name, scheduler in self._schedulers.items()}
        self._listener.stepped(events, stats, seconds)

    def _heard(self) -> list[Command]:
        """The commands that all processes obey now; waits for one if there is nothing to do."""
        several = jax.process_count() > 1
        heard: list[Command] = []
        if jax.process_index() == 0:
            if all(scheduler.idle for scheduler in self._schedulers.values()):
                with contextlib.suppress(queue.Empty):
                    heard.append(self._commands.get(timeout=_HEARTBEAT_S if several else None))
            while not self._commands.empty():
                heard.append(self._commands.get())
        if not several:
            return heard
        commands = distributed.broadcast(list(map(_portable, heard)), _MESSAGE_TYPES)
        return [self._at_home(command) for command in commands]

    def _at_home(self, command: Command) -> Command:
        """A command that was portable, with this process's vocabulary in its grammar."""
        if not isinstance(command, Submit) or command.request.grammar is None:
            return command
        return _with_vocabulary(command, self._backend.vocabulary())

    def _obey(self, commands: Sequence[Command]) -> bool:
        """Carries commands out; returns whether to go on."""
        for command in commands:
            match command:
                case Submit(mode, request):
                    self._schedulers[mode].submit(request)
                case Cancel(id):
                    any(scheduler.cancel(id) for scheduler in self._schedulers.values())
                case Flush():
                    for scheduler in self._schedulers.values():
                        scheduler.flush_prefix_cache()
                case Profile(None):
                    jax.profiler.stop_trace()
                case Profile(directory):
                    jax.profiler.start_trace(directory)
                case Stop():
                    return False
        return True


def _portable(command: Command) -> Command:
    """A command without the vocabulary of its grammar, which every process has."""
    if not isinstance(command, Submit) or command.request.grammar is None:
        return command
    return _with_vocabulary(command, None)


def _with_vocabulary(command: Submit, vocabulary: Vocabulary | None) -> Submit:
    grammar = dataclasses.replace(command.request.grammar, vocabulary=vocabulary)
    request = dataclasses.replace(command.request, grammar=grammar)
    return dataclasses.replace(command, request=request)
