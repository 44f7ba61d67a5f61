"""Process that checks a grammar, with limits on its processor time and memory.

Unlike a thread, a process can be stopped whatever it does. It compiles the grammar and matches the
first tokens, for which large automata are built. stdin has a JSON list with the grammar, the number
of tokens, the limits of the library, and those of the process; stdout gets a description of the
problem, or nothing.
"""

import json
import math
import signal
import subprocess
import sys
import time

OUT_OF_MEMORY = 3  # Exit status of a process that has caught a MemoryError.
_OUT_OF_TIME = -signal.SIGXCPU if hasattr(signal, "SIGXCPU") else None
# Signals that end native code when it runs out of memory or stack.
_CRASHED = (-signal.SIGABRT, -signal.SIGSEGV)


def start(module: str) -> subprocess.Popen:
    """Starts a Python process that calls `main()` of a module, with pipes to stdin and stdout.

    The process ignores the environment, and finds modules where this process does.
    """
    program = (
        f"import importlib, sys; sys.path[:] = {[*map(str, sys.path)]!r}; "
        f"importlib.import_module({module!r}).main()"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C concerns this process, which ends the other one
    )


def limit_time(seconds: int) -> None:
    """Lets this process use `seconds` more of processor time, rounded up to whole seconds."""
    limit("RLIMIT_CPU", math.ceil(time.process_time()) + seconds)


def exceeded(status: int, seconds: int, max_bytes: int) -> str | None:
    """Returns the limit that ended a process, such as "more than 1 s"; None for another reason."""
    if status == _OUT_OF_TIME:
        return f"more than {seconds} s"
    if status == OUT_OF_MEMORY or status in _CRASHED:
        return f"more than {max_bytes >> 20} MiB"
    return None


def main() -> None:
    """Checks the grammar of stdin."""
    grammar, num_tokens, limits, seconds, max_bytes = json.load(sys.stdin)
    import llguidance

    limit("RLIMIT_AS", max_bytes)
    limit_time(seconds)
    try:
        problem = _problem(llguidance, grammar, num_tokens, limits)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except BaseException as error:  # a panic of the library is no Exception
        problem = f"{type(error).__name__}: {error}"
    sys.stdout.buffer.write(problem.encode("utf-8", "replace"))


def limit(name: str, value: int) -> None:
    """Sets a limit; the hard limit stays, so that the soft one may be raised again."""
    try:
        import resource
    except ImportError:  # not available on Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(getattr(resource, name))
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(getattr(resource, name), (value, hard))


def _problem(llguidance, grammar: str, num_tokens: int, limits: dict) -> str:
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(num_tokens))),
        grammar,
        log_level=0,
        limits=llguidance.LLParserLimits(**limits),
    )
    for _ in range(8):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if matcher.is_error() or not allowed:
            break
        matcher.consume_token(allowed[len(allowed) // 2])
    return matcher.get_error()


class _Bytes:
    """Tokenizer whose tokens are the single bytes, special tokens, and an end token."""

    bos_token_id = None

    def __init__(self, num_tokens: int):
        self.eos_token_id = max(num_tokens, 256)
        self.special_token_ids = range(256, self.eos_token_id + 1)
        names = (b"<%d>" % token for token in self.special_token_ids)
        self.tokens = [*(bytes([byte]) for byte in range(256)), *names]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
