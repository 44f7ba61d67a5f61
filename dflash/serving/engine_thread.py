"""Engine thread: the only thread that calls jax and the schedulers.

Other threads put commands (submit, cancel, flush, profile, stop) into a queue. The thread executes
them between two dispatches, and reports events.

In a run of several processes, process 0 broadcasts its commands before each step, so that all
processes enqueue the same programs.
"""

import contextlib
import dataclasses
import queue
import sys
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence

import jax

from dflash import errors
from dflash.inference.engine import Engine
from dflash.inference.request import Event, Request, RequestOutput, RequestSampling
from dflash.inference.scheduler import Scheduler
from dflash.parallel import distributed
from dflash.serving.backend import Backend
from dflash.text.grammar import Grammar, Vocabulary
from dflash.text.token_rules import TokenRules

# The other processes wait for the next broadcast of process 0, which sends one at least this often.
_HEARTBEAT_S = 5.0


@dataclasses.dataclass(frozen=True)
class Submit:
    """Queues a request with the scheduler of a decoding mode."""

    mode: str
    request: Request


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Cancels a request if it has not finished."""

    id: int


@dataclasses.dataclass(frozen=True)
class Flush:
    """Empties the prefix caches."""


@dataclasses.dataclass(frozen=True)
class ReplaceWeights:
    """Replaces the target's weights by those of a checkpoint; requests go on with the new ones."""

    path: str


@dataclasses.dataclass(frozen=True)
class Profile:
    """Starts a profiler trace in a directory; None stops the trace."""

    directory: str | None


@dataclasses.dataclass(frozen=True)
class Stop:
    """Ends the thread."""


Command = Submit | Cancel | Flush | ReplaceWeights | Profile | Stop
# Dataclasses that process 0 may broadcast.
_MESSAGE_TYPES = (*typing.get_args(Command), Request, RequestSampling, Grammar, TokenRules)


class _StoppedEarly(Exception):
    """Stop was requested before the engines were ready."""


class EngineThread(threading.Thread):
    """Thread with a scheduler per decoding mode; `error` is the exception that ended it."""

    def __init__(self, backend: Backend, report: Callable[..., None] = lambda *_: None):
        """Creates the thread without starting it.

        Args:
          report: Function of the name and the arguments of a report, a method of `Service`; called
            on the engine thread, so it must not block.
        """
        super().__init__(name="engine", daemon=True)
        self.error: BaseException | None = None
        self._backend, self._report = backend, report
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._engines: Mapping[str, Engine] = {}
        self._schedulers: dict[str, Scheduler] = {}
        self._rejected: list[Event] = []  # Ends of requests that no scheduler took.

    # --- from any thread ------------------------------------------------------------------------

    def put(self, command: Command) -> None:
        """Queues a command, which is executed before the next step."""
        if isinstance(command, Stop):
            self._stopping.set()
        self._commands.put(command)

    # --- on the thread --------------------------------------------------------------------------

    def run(self) -> None:
        """Serves requests until a `Stop` command or a failure."""
        try:
            self._engines = self._backend.start(self._go_on)
            self._schedulers = {name: Scheduler(engine) for name, engine in self._engines.items()}
            self._report("ready", self._engines)
            while self._execute(self._next_commands()):
                self._step()
            for scheduler in self._schedulers.values():
                scheduler.close()
        except _StoppedEarly:
            pass
        except BaseException as error:
            self.error = error
        self._report("stopped", self.error)

    def _go_on(self) -> None:
        """Raises _StoppedEarly if stop was requested.

        Several processes complete the start first, since only process 0 knows of the request.
        """
        if self._stopping.is_set() and jax.process_count() == 1:
            raise _StoppedEarly

    def _step(self) -> None:
        begin = time.perf_counter()
        busy = [scheduler for scheduler in self._schedulers.values() if not scheduler.idle]
        events, self._rejected = self._rejected, []
        events += [event for scheduler in busy for event in scheduler.step()]
        for event in events:
            if isinstance(event, RequestOutput) and event.error is not None:
                print(f"request failed: {event.error}", file=sys.stderr, flush=True)
        end = time.perf_counter()
        stats = {name: scheduler.stats() for name, scheduler in self._schedulers.items()}
        self._report("stepped", events, stats, end - begin if busy else 0.0, end)

    def _next_commands(self) -> list[Command]:
        """Returns the commands to execute now; waits for one if all schedulers are idle."""
        several = jax.process_count() > 1
        commands: list[Command] = []
        if jax.process_index() == 0:
            if all(scheduler.idle for scheduler in self._schedulers.values()):
                with contextlib.suppress(queue.Empty):
                    commands.append(self._commands.get(timeout=_HEARTBEAT_S if several else None))
            while not self._commands.empty():
                commands.append(self._commands.get())
        if not several:
            return commands
        # Every process has its own copy of the vocabulary.
        commands = [_with_vocabulary(command, lambda: None) for command in commands]
        received = distributed.broadcast(commands, _MESSAGE_TYPES)
        return [_with_vocabulary(command, self._backend.vocabulary) for command in received]

    def _execute(self, commands: Sequence[Command]) -> bool:
        """Executes commands; returns False after a `Stop`."""
        for command in commands:
            match command:
                case Submit(mode, request):
                    try:
                        self._schedulers[mode].submit(request)
                    except errors.InputError as error:
                        self._rejected.append(RequestOutput.failed(request, error))
                case Cancel(id):
                    any(scheduler.cancel(id) for scheduler in self._schedulers.values())
                case Flush():
                    for scheduler in self._schedulers.values():
                        scheduler.flush_prefix_cache()
                case ReplaceWeights(path):
                    self._report("updated", self._update(path))
                case Profile(None):
                    jax.profiler.stop_trace()
                case Profile(directory):
                    jax.profiler.start_trace(directory)
                case Stop():
                    return False
        return True

    def _update(self, path: str) -> str | None:
        """Replaces the target's weights; returns the reason if the old ones stay."""
        try:
            self._backend.update_weights(path, self._engines)
        except errors.UserError as error:
            return str(error)
        for scheduler in self._schedulers.values():
            scheduler.restart()
        return None


def _with_vocabulary(command: Command, vocabulary: Callable[[], Vocabulary | None]) -> Command:
    """Replaces the vocabulary of a command's grammar, if it has one."""
    if not isinstance(command, Submit) or command.request.grammar is None:
        return command
    grammar = dataclasses.replace(command.request.grammar, vocabulary=vocabulary())
    request = dataclasses.replace(command.request, grammar=grammar)
    return dataclasses.replace(command, request=request)
