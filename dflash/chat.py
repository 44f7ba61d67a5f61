"""A conversation with a target in the terminal: dflash chat CONFIG [key=value ...]."""

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from absl import flags

from dflash import errors
from dflash.cli import subcommand as cli
from dflash.config import schema

if TYPE_CHECKING:
    import rich.console

    from dflash.llm import LLM, Completion, Piece, Sampling

_DRAFTED, _DRAWN, _QUIET = "green", "bold", "dim"
_CLEAR, _QUIT, _HELP = "/clear", "/quit", "/help"
_WELCOME = (
    "green: accepted drafts; bold: the target's own tokens, one in each cycle; τ: tokens per cycle"
)
_KEYS = f"ctrl-C stops an answer, ctrl-D or {_QUIT} leaves; {_HELP} lists the commands"
_COMMANDS = f"""{_CLEAR}  forgets the conversation
{_HELP}   shows this list
{_QUIT}   leaves, as ctrl-D does
ctrl-C  stops an answer, or drops the line"""


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("system", None, "A system message, before all turns.", flag_values=values)


SUBCOMMAND = cli.Subcommand(
    "chat",
    "Talks to a target in the terminal: accepted drafts and the target's own tokens in two colors, "
    "and τ after each answer. The whole conversation is given to each answer. ctrl-C stops an "
    "answer, ctrl-D leaves, and /help lists the commands. Prompts of the config are ignored; from "
    "a pipe each line is a message.",
    examples=(
        "dflash chat configs/tiny_dflash.yml",
        "dflash chat configs/qwen3_4b_dflash.yml decode.max_new_tokens=1024",
        "dflash chat configs/qwen3_4b_dflash.yml --system 'Be brief.'",
        "dflash chat configs/qwen3_4b_dflash.yml drafter.block_size=auto",
        "dflash chat hf:Qwen/Qwen3-0.6B",
    ),
    schema=schema.DecodeRun,
    shared=("print_config", "compilation_cache"),
    define_flags=_define_flags,
)


def _chat(command: cli.Command) -> None:
    # jax is imported here, after the config has been validated.
    from dflash.llm import LLM
    from dflash.runs.display import Display

    with contextlib.suppress(AttributeError):  # A replaced stdout may lack it.
        sys.stdout.reconfigure(errors="backslashreplace")  # The terminal's encoding may lack some.
    display = Display(stream=False)
    with display.status("loading weights"):
        llm = LLM(command.config_path, *command.overrides)
    # Raise before the user types if the checkpoint has no chat template.
    llm.tokenizer.render_chat([{"role": "user", "content": ""}])
    Conversation(llm, system=command.flags["system"]).run()


def count_line(pieces: "Sequence[Piece]", completion: "Completion | None") -> str:
    """Returns one line about an answer, which is stopped if it has no completion."""
    drafted = sum(len(piece.token_ids) for piece in pieces if piece.drafted)
    count = sum(len(piece.token_ids) for piece in pieces)
    line = f"{count} tokens, {drafted} drafted"
    if completion is None:
        return f"{line} · stopped"
    hint = {"length": ": decode.max_new_tokens or decode.max_length"}
    ending = completion.finish_reason + hint.get(completion.finish_reason, "")
    tau = f"τ {completion.tau:.2f} · " if completion.acceptance_lengths else ""
    return f"{tau}{line} · {ending}"


class Conversation:
    """Conversation of a user and a target, on a terminal or through pipes.

    Attributes:
      messages: Turns so far, each with "role" and "content".
    """

    def __init__(
        self,
        llm: "LLM",
        *,
        system: str | None = None,
        sampling: "Sampling | None" = None,
        out: "rich.console.Console | None" = None,
        err: "rich.console.Console | None" = None,
        read: Callable[[], str] | None = None,
    ):
        """Creates a conversation without turns.

        Args:
          system: System message before all turns.
          sampling: Sampling parameters of the answers; None takes the config's.
          out: Console for the answers; stdout by default.
          err: Console for everything else; stderr by default.
          read: Returns the next message; EOFError ends the conversation. By default it reads stdin.
        """
        from rich.console import Console

        self._llm, self._sampling = llm, sampling
        self._out = out or Console(highlight=False, markup=False, emoji=False)
        self._err = err or Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._read = read or self._read_line
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Mapping[str, str]] = list(self._first)

    def run(self) -> None:
        """Answers messages until there are no more."""
        if self._out.is_terminal:
            self._note(f"{_WELCOME}\n{_KEYS}")
        while True:
            try:
                text = self._read().strip()
            except EOFError:
                if self._out.is_terminal:
                    self._out.print()
                return
            except KeyboardInterrupt:  # As in a shell, ctrl-C drops the line.
                self._note(f"\n{_KEYS}")
                continue
            if text == _QUIT:
                return
            if text:
                self._command(text) if text.startswith("/") else self._turn(text)

    def _command(self, text: str) -> None:
        """Follows a command; a line that only looks like one is a message."""
        if text == _CLEAR:
            self.messages = list(self._first)
        elif text == _HELP:
            self._note(_COMMANDS)
        elif self._out.is_terminal and re.fullmatch(r"/[a-z]+", text):
            self._note(f"{text}: no such command\n{_COMMANDS}")
        else:
            self._turn(text)

    def _turn(self, text: str) -> None:
        """Answers a message; a message that cannot be answered is not kept."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self._answer(messages)
        except KeyboardInterrupt:
            self._note("\nstopped; forgotten")
            return
        except errors.InputError as error:  # Too long, or rejected by the template.
            for line in str(error).splitlines():
                self._err.print(f"error: {line}; {_CLEAR} begins anew", soft_wrap=True)
            return
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[Mapping[str, str]]) -> str:
        """Prints an answer as its tokens are accepted, and returns its text."""
        from rich.text import Text

        from dflash.runs.result_text import visible

        pieces = []
        with self._err.status("compiling, if this length is new"):  # Shown on terminals only.
            stream = self._llm.stream(messages, self._sampling)
        with _stop_on_interrupt() as stopped:
            for piece in stream:
                pieces.append(piece)
                if self._out.is_terminal:
                    style = _DRAFTED if piece.drafted else _DRAWN
                    self._out.print(Text(visible(piece.text), style), end="", soft_wrap=True)
                else:
                    self._out.file.write(piece.text)
                self._out.file.flush()
                if stopped():
                    break
        self._out.print()
        self._note(count_line(pieces, stream.completion))
        return "".join(piece.text for piece in pieces)

    def _note(self, text: str) -> None:
        self._err.print(text, style=_QUIET, soft_wrap=not self._err.is_terminal)

    def _read_line(self) -> str:
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, lets `input` edit and recall lines
        return input("> ")


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether ctrl-C was pressed; a second press interrupts."""
    pressed: list[int] = []

    def press(number, frame):
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt
        print("\nstopping; again stops at once", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


main = cli.entry_point(SUBCOMMAND, _chat)

if __name__ == "__main__":
    main()
