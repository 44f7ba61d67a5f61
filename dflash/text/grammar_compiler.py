"""Compilation of grammars with llguidance, with limits on time and memory."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from dflash import errors
from dflash.text import grammar_check
from dflash.version import install_command

Kind = Literal["json_object", "json_schema", "regex", "lark"]

MAX_SOURCE_BYTES = 2**16
COMPILE_SECONDS = 1  # processor time; a schema of 64 KiB takes 0.1 s
_CLOCK_SECONDS = 30  # wall-clock time, for a process that does not run at all
_COMPILE_BYTES = 2**30
_POLL_S = 0.05  # interval at which a caller may abandon a check
_MAX_CHECKED = 1024  # grammars whose check is remembered
# Real schemas stay far below these limits; grammars that exceed them are rejected, when they are
# compiled or in the middle of an output. The time of a mask grows with the product of both numbers
# of items: with these, the most ambiguous grammars that we know take 0.1 s.
_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}

# A place of an object takes four items per property that it may go on with. Schemas are hardly
# ambiguous: with 4000 items their masks take some milliseconds.
_ROW_ITEMS = {"json_object": 4000, "json_schema": 4000, "regex": 500, "lark": 500}

_JSON_OPTIONS = {
    # Reject unsupported keywords, even if the schema asks for lenient treatment.
    "lenient": False,
    # A space, or a line break with indentation. Some models never stop writing unlimited space.
    "whitespace_pattern": r"( |\n[ \t]{0,32})?",
}

# Keywords of JSON schemas: without effect, with schemas by name, and with values.
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$comment", "strict"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(("enum", "const", "required"))
_PROGRAM = "dflash.text.grammar_check"
_problems: dict[tuple[Kind, str], str] = {}  # results of finished checks, oldest first


def limits(kind: Kind) -> dict[str, Any]:
    """Returns the limits of llguidance's parser for a kind of grammars."""
    return {**_LIMITS, "max_items_in_row": _ROW_ITEMS[kind]}


def check(
    kind: Kind, source: str, num_tokens: int, is_abandoned: Callable[[], bool] = lambda: False
) -> None:
    """Checks that a grammar compiles in the allowed time and memory.

    Args:
      num_tokens: Number of token ids that a Lark grammar may name.
      is_abandoned: Returns True once nobody waits for the result, which ends the check.
    Raises:
      UserError: The check was abandoned, or ended for a reason that does not lie in the grammar.
    """
    import_llguidance()
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise unusable(kind, "contains an unpaired surrogate") from error
    if size > MAX_SOURCE_BYTES:
        raise unusable(kind, f"{size} bytes, expected at most {MAX_SOURCE_BYTES}")
    problem = _problems.get((kind, source))
    if problem is None:
        problem = _find_problem(kind, source, num_tokens, is_abandoned)
        if len(_problems) >= _MAX_CHECKED:
            _problems.pop(next(iter([*_problems])), None)
        _problems[kind, source] = problem
    if problem:
        raise unusable(kind, problem)


def _find_problem(
    kind: Kind, source: str, num_tokens: int, is_abandoned: Callable[[], bool]
) -> str:
    """Compiles a grammar in a separate process; returns a description of the problem, or "".

    The process is needed because the limits of the library do not cover everything: some short
    schemas take minutes.
    """
    values = [serialize(kind, source), num_tokens, limits(kind), COMPILE_SECONDS, _COMPILE_BYTES]
    try:
        process = grammar_check.start(_PROGRAM)
    except OSError as error:
        raise _unchecked(kind, error.strerror or str(error)) from error
    with process:
        try:
            output = _output(kind, process, json.dumps(values).encode(), is_abandoned)
        finally:
            process.kill()  # has no effect on a process that has ended
    if process.returncode == 0:
        return output.decode(errors="replace")
    limit = grammar_check.exceeded(process.returncode, COMPILE_SECONDS, _COMPILE_BYTES)
    if limit is None:
        raise _unchecked(kind, f"the process that compiles it ended with {process.returncode}")
    return f"takes {limit} to compile; make it simpler"


def _output(
    kind: Kind, process: subprocess.Popen, values: bytes | None, is_abandoned: Callable[[], bool]
) -> bytes:
    end = time.monotonic() + _CLOCK_SECONDS
    while True:
        try:
            return process.communicate(values, timeout=_POLL_S)[0]
        except subprocess.TimeoutExpired:
            values = None  # the next call goes on with the same values
            if is_abandoned():
                raise _unchecked(kind, "nobody waits for it any more") from None
            if time.monotonic() > end:
                raise _unchecked(kind, f"not compiled within {_CLOCK_SECONDS} s") from None


def _unchecked(kind: Kind, reason: str) -> errors.UserError:
    return errors.UserError(f"{kind}: cannot be checked now: {reason}; try again")


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


def inline_schema(schema: Any) -> str:
    """Returns the Lark expression of a JSON schema, without texts that describe it."""
    if not isinstance(schema, Mapping):
        schema = {} if schema is True else {"not": {}}
    return f"%json {json.dumps(_plain_schema(schema) | {'x-guidance': _JSON_OPTIONS})}"


def _plain_schema(schema: Any) -> Any:
    """Returns a JSON schema without annotations, which may be longer than all the rest."""
    if isinstance(schema, list):
        return [_plain_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            plain[name] = {key: _plain_schema(item) for key, item in value.items()}
        elif name not in ANNOTATIONS:
            plain[name] = value if name in _VALUES else _plain_schema(value)
    return plain


def unusable(kind: Kind, problem: str) -> errors.InputError:
    """Returns the error for an unusable grammar."""
    line = " ".join(problem.split("<state>")[0].split())
    return errors.InputError(f"{kind}: {line if len(line) <= 200 else f'{line[:199]}…'}")


def import_llguidance() -> Any:
    """Imports llguidance; raises InputError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise errors.InputError(
            f"structured output needs llguidance; {install_command('grammar')}"
        ) from error
    return llguidance
