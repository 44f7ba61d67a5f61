"""Compilation of grammars with llguidance, with limits on time and memory."""

import functools
import json
import signal
import subprocess
import sys
from typing import Any, Literal

from dflash import errors
from dflash.version import install_command

Kind = Literal["json_object", "json_schema", "regex", "lark"]

MAX_SOURCE_BYTES = 2**16
COMPILE_SECONDS = 3  # processor time
_MAX_CLOCK_RATIO = 10  # of wall-clock time to COMPILE_SECONDS, for stuck processes
_COMPILE_BYTES = 2**30
# Real schemas stay far below these limits; grammars that exceed them are rejected.
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}

_JSON_OPTIONS = {
    # Reject unsupported keywords, even if the schema asks for lenient treatment.
    "lenient": False,
    # A space, or a line break with indentation. Some models never stop writing unlimited space.
    "whitespace_pattern": r"( |\n[ \t]{0,32})?",
}

# Exit status of a process that exceeds its processor time; None on systems without such a limit.
_OUT_OF_TIME = -signal.SIGXCPU if hasattr(signal, "SIGXCPU") else None
# The program also matches the first tokens of an output, because large automata are built then. Its
# limit is on processor time, since wall-clock time depends on the load of the machine.
_PROGRAM = """
import json, math, sys, time
import llguidance

class Bytes:
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    def __call__(self, text):
        return list(text)

grammar, limits, seconds, most_bytes = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    end = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 1))
except ImportError:  # not available on Windows
    pass
matcher = llguidance.LLMatcher(
    llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes())),
    grammar, log_level=0, limits=llguidance.LLParserLimits(**limits),
)
for _ in range(8):
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    allowed = [byte for byte in range(256) if mask >> byte & 1]
    if matcher.is_error() or not allowed:
        break
    matcher.consume_token(allowed[len(allowed) // 2])
print(matcher.get_error(), end="")
"""


def check(kind: Kind, source: str) -> None:
    """Checks that a grammar compiles in the allowed time and memory.

    Raises:
      InputError: The grammar does not compile, or llguidance is not installed.
    """
    import_llguidance()
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise unusable(kind, "contains an unpaired surrogate") from error
    if size > MAX_SOURCE_BYTES:
        raise unusable(kind, f"{size} bytes, expected at most {MAX_SOURCE_BYTES}")
    problem = _find_problem(kind, source)
    if problem:
        raise unusable(kind, problem)


@functools.lru_cache(maxsize=1024)
def _find_problem(kind: Kind, source: str) -> str:
    """Compiles a grammar in a separate process; returns a description of the problem, or "".

    Unlike a thread, a process can be stopped. This is needed because the limits of the library do
    not cover everything: some short schemas take minutes.
    """
    too_long = f"takes more than {COMPILE_SECONDS} s to compile; make it simpler"
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM],
            input=json.dumps([serialize(kind, source), LIMITS, COMPILE_SECONDS, _COMPILE_BYTES]),
            capture_output=True,
            text=True,
            timeout=_MAX_CLOCK_RATIO * COMPILE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return too_long
    if process.returncode == _OUT_OF_TIME:
        return too_long
    if process.returncode:
        return f"takes more than {_COMPILE_BYTES >> 20} MiB to compile; make it simpler"
    return process.stdout


def serialize(kind: Kind, source: str) -> str:
    """Converts a grammar to the format of llguidance."""
    matcher = import_llguidance().LLMatcher
    if kind == "regex":
        return matcher.grammar_from_regex(source)
    if kind == "lark":
        return matcher.grammar_from_lark(source)
    try:
        return matcher.grammar_from_json_schema(
            source if kind == "json_schema" else '{"type": "object"}', overrides=_JSON_OPTIONS
        )
    except ValueError as error:
        raise unusable(kind, str(error)) from error


def unusable(kind: Kind, problem: str) -> errors.InputError:
    """Returns the error for an unusable grammar."""
    return errors.InputError(f"{kind}: {_first_line(problem)}")


def _first_line(problem: str) -> str:
    """Shortens an error message of the library to one line of at most 200 characters."""
    line = " ".join(problem.split("<state>")[0].split())
    return line if len(line) <= 200 else f"{line[:199]}…"


def import_llguidance() -> Any:
    """Imports llguidance; raises InputError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise errors.InputError(
            f"structured output needs llguidance; {install_command('grammar')}"
        ) from error
    return llguidance
