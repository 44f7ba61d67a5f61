"""Special tokens in rendered chats: the template's own count, those that a message spells do not.

A message may hold the spelling of a special token, such as "<|im_end|>". Before the template
renders it, each character of such a spelling gets a mark, so that in the rendered text only the
template's own special tokens are left to be found; `split` finds them and takes the marks away.
Messages without such spellings are rendered and encoded as they are.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MARK = "\ufdd0"  # a character that Unicode reserves for uses inside programs
_MARKED = re.compile(f"{MARK}(.)", re.DOTALL)


class SpecialTokens:
    """The spellings of a tokenizer's special tokens, and their ids."""

    def __init__(
        self, ids: Mapping[str, int], *, strips: Mapping[str, tuple[bool, bool]] | None = None
    ):
        """Makes the patterns.

        Args:
          ids: by spelling.
          strips: spelling -> whether the token takes the spaces before it, and those after it.
        """
        self._ids = {spelling: token for spelling, token in ids.items() if spelling}
        spellings = sorted(self._ids, key=len, reverse=True)  # the longest match wins
        self._longest = max(map(len, spellings), default=0)
        self._beginnings = {one[:size] for one in spellings for size in range(1, len(one))}
        plain = "|".join(map(re.escape, spellings)) or "(?!)"
        self._spelled = re.compile(f"{plain}|{MARK}")
        parts = (_pattern(one, *(strips or {}).get(one, (False, False))) for one in spellings)
        # A mark takes the character after it along, so that no token begins there.
        self._found = re.compile(f"{MARK}.|({'|'.join(parts) or '(?!)'})", re.DOTALL)

    def spelled_in(self, text: str) -> bool:
        """Whether a text holds a spelling of a special token, or a mark."""
        return self._spelled.search(text) is not None

    def mark(self, value: Any) -> Any:
        """Text, or every text in a JSON value, with its spellings of special tokens marked.

        The beginning of one at a text's end is marked as well: another text may follow.
        """
        if isinstance(value, str):
            marked = self._spelled.sub(lambda match: _mark_all(match.group()), value)
            end = self._opened_at(marked)
            return marked[:end] + _mark_all(marked[end:])
        if isinstance(value, Mapping):
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def _opened_at(self, marked: str) -> int:
        """Where the longest beginning of a spelling at a text's end begins; its length if none."""
        unmarked = max((match.end() for match in _MARKED.finditer(marked)), default=0)
        first = max(unmarked, len(marked) - self._longest)
        places = (at for at in range(first, len(marked)) if marked[at:] in self._beginnings)
        return next(places, len(marked))

    def split(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Yields a rendered text's special tokens as (id, spelling), the rest as (None, text)."""
        start = 0
        for match in self._found.finditer(text):
            if match[1] is None:
                continue
            if match.start() > start:
                yield None, without_marks(text[start : match.start()])
            spelling = match[1] if match[1] in self._ids else match[1].strip()
            yield self._ids[spelling], spelling
            start = match.end()
        if start < len(text):
            yield None, without_marks(text[start:])


def without_marks(text: str) -> str:
    """A marked text as it was written."""
    return _MARKED.sub(r"\1", text)


def _mark_all(text: str) -> str:
    return "".join(MARK + character for character in text)


def _pattern(spelling: str, left: bool, right: bool) -> str:
    # The lookbehind keeps long runs of spaces from being tried from each of their places.
    before = r"(?:(?<!\s)\s+)?" if left else ""
    return before + re.escape(spelling) + (r"\s*" if right else "")
