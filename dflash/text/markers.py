"""Search for marker strings at the end of a text that arrives in pieces."""

from collections.abc import Sequence


def unfinished(text: str, markers: Sequence[str]) -> int:
    """Returns the length of the longest end of a text that begins a marker, without being one."""
    longest = max(map(len, markers), default=1) - 1
    starts = range(max(0, len(text) - longest), len(text))
    return next((len(text) - at for at in starts if _begins(text[at:], markers)), 0)


def _begins(end: str, markers: Sequence[str]) -> bool:
    return any(len(end) < len(marker) and marker.startswith(end) for marker in markers)
