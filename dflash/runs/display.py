"""Terminal output of a run: generated text on stdout as it is accepted, all else on stderr.

Redirecting stdout therefore yields clean text, while a terminal shows both.
"""

import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

import rich.console
import rich.control
import rich.progress
import rich.table
import rich.text
from rich.segment import ControlType

from dflash.runs import compilation_cache, outputs, result_text, terminal

BAR_WIDTH = 24  # Characters of a progress bar.
QUIET_S = 30.0  # Minimum time between lines of progress without a terminal.


class Display:
    """Display of a run, which shows prompts in order of their indices, not of their completion.

    The text of the first unfinished prompt streams; the text of later prompts is held back.
    """

    def __init__(
        self,
        *,
        stream: bool = True,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ):
        """Opens the display.

        Args:
          stream: Show generated text; otherwise show only one line per finished prompt.
        """
        self._stream = stream
        self._stdout = _tolerant(stdout or sys.stdout)
        stderr = _tolerant(stderr or sys.stderr)
        self._console = rich.console.Console(file=stderr, highlight=False, markup=False)
        self._stdout_is_terminal = self._stdout.isatty()
        self._prompt_tokens: dict[int, int] = {}
        self._prompts: dict[int, str] = {}
        self._order: collections.deque[int] = collections.deque()
        self._begun = False  # The header of the first prompt in `_order` has been shown.
        self._held: dict[int, list[str]] = collections.defaultdict(list)
        self._summaries: dict[int, str] = {}
        self._mid_line = False  # Stdout is in the middle of a line.
        self._status_open = False

    @classmethod
    def silent(cls) -> "Display":
        """Returns a display that shows nothing, for all processes of a run except the first."""
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, stays open with the run
        return cls(stream=False, stdout=nowhere, stderr=nowhere)

    def expect(
        self, prompt_tokens: Mapping[int, int], prompts: Mapping[int, str] | None = None
    ) -> None:
        """Announces the prompts to come; `prompts` are texts to show before their answers."""
        self._prompt_tokens.update(prompt_tokens)
        self._prompts.update(prompts or {})
        self._order.extend(sorted(prompt_tokens))

    def token(self, index: int, text: str) -> None:
        """Shows or holds back the next piece of a prompt's output."""
        if not self._stream:
            return
        self._held[index].append(text)
        self._flush()

    def finish(self, index: int, summary: str) -> None:
        """Marks a prompt as finished, and shows its `summary_line`."""
        if not self._stream:
            self.note(f"{self._title(index)} · {summary}")
            return
        self._summaries[index] = summary
        self._flush()

    def note(self, message: str) -> None:
        """Shows one line on stderr."""
        self._fresh_line()
        text = rich.text.Text(message)
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    @contextlib.contextmanager
    def status(self, message: str) -> Iterator[None]:
        """Shows `message …` on stderr, and then the time that the block took."""
        self._fresh_line()
        self._say(f"{message} … ")
        self._status_open = True
        start = time.perf_counter()
        yield
        elapsed = f"{time.perf_counter() - start:.1f} s\n"
        if self._console.is_terminal:  # A bar in between may have erased the line.
            self._console.control(rich.control.Control(ControlType.CARRIAGE_RETURN))
        # Repeat the message if something else was shown in between.
        repeats = self._console.is_terminal or not self._status_open
        self._say(f"{message} … {elapsed}" if repeats else elapsed)
        self._status_open = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Callable[[int, int], None]]:
        """Shows on stderr the number of compiled programs, and how many came from the cache.

        Yields:
          Function of the number of finished programs and their total. Nothing is shown before its
          first call.
        """
        start, shown_total = time.perf_counter(), 0

        def show(ready: int, total: int) -> None:
            nonlocal shown_total
            if not shown_total:
                self._fresh_line()
                self._status_open = True
            if self._console.is_terminal:
                self._console.control(rich.control.Control(ControlType.CARRIAGE_RETURN))
                self._say(f"compiling {ready}/{total} … ")
            elif not shown_total:
                self._say(f"compiling {total} program{'' if total == 1 else 's'} … ")
            shown_total = total

        with compilation_cache.count_hits() as hits:
            yield show
        if shown_total:
            cached = "all" if len(hits) >= shown_total else len(hits)
            more = f", {cached} from the cache" if hits else ""
            self._say(f"{time.perf_counter() - start:.1f} s{more}\n")
            self._status_open = False

    @contextlib.contextmanager
    def progress(
        self, message: str, *, every_s: float | None = None
    ) -> Iterator[Callable[[str, float], None]]:
        """Shows on stderr the progress of a task and its current step, and then its total time.

        A terminal shows a bar. Otherwise a line now and then shows in a log that the run is alive.

        Args:
          every_s: Minimum seconds between lines without a terminal; None is `QUIET_S`.
        Yields:
          Function to call before each step, with its name and the completed fraction, 0 to 1.
        """
        self._fresh_line()
        start = reported = time.perf_counter()
        bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=BAR_WIDTH),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeElapsedColumn(),
            # Put the step last and truncate it, so that nothing else moves when it changes.
            rich.progress.TextColumn(
                "{task.fields[what]}",
                markup=False,
                table_column=rich.table.Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            console=self._console,
            transient=True,
            expand=True,
            disable=not self._console.is_terminal,
        )
        task = bar.add_task(message, total=1.0, what="")

        def step(what: str, done: float) -> None:
            nonlocal reported
            bar.update(task, completed=done, what=what)
            least = QUIET_S if every_s is None else every_s
            if bar.disable and time.perf_counter() - reported >= least:
                reported = time.perf_counter()
                self.note(f"{message} · {100 * done:.0f} % · {what}")

        with bar:
            yield step
        self.note(f"{message} … {time.perf_counter() - start:.1f} s")

    def results(self, summary: outputs.Summary, more: Sequence[tuple[str, str]] = ()) -> None:
        """Shows the summary of a run, and `more` rows, as a table on stderr."""
        rows = [*result_text.result_rows(summary), *more]
        width = max(len(name) for name, _ in rows)
        self._lines([f"{name:<{width}}  {value}".rstrip() for name, value in rows])
        if summary.cycles:
            self._console.print("\ntokens per cycle")
            for line in result_text.histogram_lines(summary.acceptance_histogram):
                self._console.print(line, soft_wrap=True)

    def comparison(
        self,
        records: Mapping[int, outputs.Record],
        baseline: Mapping[int, outputs.Record],
        summary: outputs.Summary,
        comparison: outputs.Comparison,
        warning: str | None = None,
    ) -> None:
        """Shows a run and its baseline as a table on stderr, with a row per prompt and a total.

        Args:
          warning: Reason why no speed is trustworthy; None if there is none.
        """
        heads = ("prompt", "τ", "tokens/s", "plain tokens/s", "speed-up", "identical")
        busy = warning is not None
        rows = result_text.comparison_rows(records, baseline, summary, comparison, busy=busy)
        self.table([heads, *rows])
        if busy or any(row[4].endswith(result_text.MARK) for row in rows):
            reason = warning or "more than τ, so a time was disturbed"
            self.note(f"{result_text.MARK}: not trustworthy: {reason}")

    def table(self, rows: Sequence[Sequence[str]], keys: int = 1) -> None:
        """Shows a table on stderr; the first row holds the heads, the first columns the names."""
        width = self._console.width if self._console.is_terminal else None
        self._lines(terminal.table_lines(rows, keys=keys, width=width))

    def _lines(self, lines: Sequence[str]) -> None:
        self._fresh_line()
        self._say("".join(f"{line}\n" for line in ("", *lines)))

    def close(self) -> None:
        """Ends the current line, so that later output starts on a new one."""
        self._fresh_line()

    def _flush(self) -> None:
        """Shows finished prompts in order, and the text so far of the first unfinished one."""
        while self._order:
            index = self._order[0]
            if index not in self._held and index not in self._summaries:
                return
            if not self._begun:
                self._fresh_line()
                lines = [
                    f"── {self._title(index)}",
                    *result_text.quoted(self._prompts.pop(index, "")),
                ]
                self._say("".join(f"{line}\n" for line in lines), style="dim")
                self._begun = True
            self._write("".join(self._held.pop(index, [])))
            if index not in self._summaries:
                return
            if self._mid_line:
                self._write("\n")  # Text in a pipe ends with a newline, too.
            self._say(f"── {self._summaries.pop(index)}\n", style="dim")
            self._order.popleft()
            self._begun = False

    def _title(self, index: int) -> str:
        return f"prompt {index} · {result_text.token_count(self._prompt_tokens[index])}"

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._status_open:
            self._fresh_line()
        self._mid_line = not text.endswith("\n")
        if self._stdout_is_terminal:
            text = result_text.visible(text)
        self._stdout.write(text)
        self._stdout.flush()

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(rich.text.Text(text, style=style), end="", soft_wrap=True)

    def _fresh_line(self) -> None:
        if self._status_open or (self._mid_line and self._stdout_is_terminal):
            self._say("\n")
        self._status_open = False
        if self._stdout_is_terminal:
            self._mid_line = False


def _tolerant(stream: TextIO) -> TextIO:
    """Makes a stream escape characters that its encoding lacks, and returns the stream."""
    if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return stream
