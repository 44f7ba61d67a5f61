"""Errors that a user can act on, reported as plain lines without a traceback.

Every message names the file, key or token at fault and says what to do about it. Entry points
print the message on stderr and exit with `exit_status`: 2 for problems of the input (config,
prompts, checkpoints), 1 for problems of the run itself.
"""

INTERRUPTED = 130  # Exit status 128 + SIGINT, as shells report it.
BROKEN_PIPE = 141  # Exit status 128 + SIGPIPE.

_MAX_CHARACTERS = 1000  # Limit per line of a message, as a quoted value may be a whole file.


class UserError(Exception):
    """Problem outside the program; the message names it and how to fix it."""

    exit_status = 1

    def __init__(self, message: str):
        super().__init__("\n".join(shorten(line) for line in message.splitlines()))


class InputError(UserError):
    """Prompts, prompt files or other input data are unusable."""

    exit_status = 2


class ConfigError(UserError):
    """The configuration is unusable; holds every problem found, one line each."""

    exit_status = 2

    def __init__(self, *problems: str):
        self.problems = tuple(map(shorten, problems))
        super().__init__("\n".join(self.problems))


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit; the message names file and tensor."""

    exit_status = 2


class NumericsError(UserError):
    """A model computes non-finite values; the message names where they first appear."""


class UnequalError(UserError):
    """Drafted output differs from plain decoding by more than rounding explains."""


class WorkdirError(UserError):
    """Results cannot be written, or their directory belongs to another run, or is damaged."""


def shorten(text: str, characters: int = _MAX_CHARACTERS) -> str:
    """Returns `text`, cut to `characters` and marked with an ellipsis if longer."""
    return text if len(text) <= characters else f"{text[:characters]}…"
