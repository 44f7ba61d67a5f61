"""Program of the process that checks a grammar: compiles it and matches the first tokens.

Large automata are built for the first tokens. stdin has a JSON list with the grammar, the number of
tokens, the limits of the library, and those of the process; stdout gets a description of the
problem, or nothing.
"""

import json
import sys

from dflash.text import limited_process


def main() -> None:
    """Checks the grammar of stdin."""
    grammar, num_tokens, limits, seconds, max_bytes = json.load(sys.stdin)
    import llguidance

    limited_process.limit_memory(max_bytes)
    limited_process.limit_time(seconds)
    try:
        problem = _problem(llguidance, grammar, num_tokens, limits)
    except MemoryError:
        sys.exit(limited_process.OUT_OF_MEMORY)
    except BaseException as error:  # a panic of the library is no Exception
        problem = f"{type(error).__name__}: {error}"
    sys.stdout.buffer.write(problem.encode("utf-8", "replace"))


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
