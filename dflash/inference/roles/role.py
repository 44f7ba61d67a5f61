"""Part of the work that an engine does: prefill, decoding, or both."""

import enum
from collections.abc import Iterable

from dflash.inference.program_table import FOR_GREEDY

_COMMON = {"new_state", "new_prefill_state", "unconstrained", "insert", "release"}
_PREFILL = _COMMON | {"prefill", "new_context", "store", "restore", "replay"}
_DECODE = _COMMON | {"generate", "draft", "conclude", "set_pages", "occupied"}


class Role(enum.StrEnum):
    """Part of the work that an engine does."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"

    def programs(self, names: Iterable[tuple]) -> list[tuple]:
        """Returns the names of this role's programs, given those of an engine that does both."""
        if self is Role.BOTH:
            return list(names)
        kinds = _PREFILL if self is Role.PREFILL else _DECODE
        own = "read_sequence" if self is Role.PREFILL else "write_sequence"
        return [*(name for name in names if name[0].removesuffix(FOR_GREEDY) in kinds), (own,)]
