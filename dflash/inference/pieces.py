"""Pieces of prompts, as the host cuts them, and the chunk that the device is given of them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.pages import Layout
from dflash.inference.prefill import ChunkInputs
from dflash.inference.request import Sampling

GREEDY = Sampling()
OPEN = -1  # in place of the token after a piece, where the target is to draw it


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Tokens of a sequence that one call runs.

    Attributes:
      tokens: the piece.
      start: position of its first token.
      following: the token after it; negative where the target is to draw it.
      pages: of the sequence, for the positions up to the piece's end at least.
      sampling: of the sequence.
      fresh: the first piece that the drafter sees of the sequence.
      asked: of the token that the target is to draw, without batch; None: nothing.
    """

    tokens: Sequence[int]
    start: int
    following: int
    pages: Sequence[int]
    sampling: Sampling
    fresh: bool
    asked: FirstTokenConstraints | None = None

    @classmethod
    def of(
        cls,
        text: Sequence[int],
        start: int,
        end: int,
        pages: Sequence[int],
        sampling: Sampling,
        *,
        fresh: bool,
        asked: FirstTokenConstraints | None = None,
    ) -> "PrefillChunk":
        """Tokens start … end - 1 of a text; if it goes on, it says which token follows."""
        following = text[end] if end < len(text) else OPEN
        asked = None if end < len(text) else asked
        return cls(text[start:end], start, following, pages, sampling, fresh, asked)


# Of a lane without a prompt: its rows go to the scratch page.
IDLE = PrefillChunk((), 0, OPEN, (), GREEDY, fresh=False)


def pack(pieces: Mapping[int, PrefillChunk], lanes: int, layout: Layout) -> ChunkInputs:
    """The next piece of every lane, padded to the size of one program.

    Args:
      pieces: by lane.
      lanes: n, how many there are.
      layout: of the batch.
    Raises:
      ValueError: a piece is empty, or longer than a chunk.
    """
    lengths = [len(piece.tokens) for piece in pieces.values()]
    shortest, longest = min(lengths), max(lengths)
    if not 0 < shortest <= longest <= layout.longest_chunk:
        raise ValueError(
            f"pieces of {shortest} to {longest} tokens, expected 1 to {layout.longest_chunk}"
        )
    rows = layout.chunk(longest)
    chosen = [pieces.get(lane, IDLE) for lane in range(lanes)]
    return ChunkInputs(
        tokens=np.stack([padded(one.tokens, rows) for one in chosen]),
        start=np.array([one.start for one in chosen], np.int32),
        count=np.array([len(one.tokens) for one in chosen], np.int32),
        following=np.array([one.following for one in chosen], np.int32),
        fresh=np.array([one.fresh for one in chosen]),
        table=np.stack([padded(one.pages, layout.prefill_pages) for one in chosen]),
    )


def padded(numbers: Sequence[int], length: int) -> np.ndarray:
    """int32 [length], filled up with zeros."""
    row = np.zeros(length, np.int32)
    row[: len(numbers)] = numbers
    return row
