"""Untimed decoding of a prompt that records the drafts beside the committed tokens."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dflash.inference.admission import admit
from dflash.inference.pages import Slot
from dflash.inference.request import Request
from dflash.measure.engine import MeasuredEngine
from dflash.text.tokenizer import IncrementalDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class Frame:
    """One cycle as text.

    Attributes:
      tokens: Number of committed tokens.
      accepted: Text of each accepted draft.
      bonus: Text of the target's own token; empty if the sequence ended before it.
      rejected: Text of each rejected draft.
    """

    tokens: int
    accepted: tuple[str, ...]
    bonus: str
    rejected: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Replay:
    """Whole sequence: its first token, which prefill returns, then a frame for each cycle."""

    first: str
    frames: tuple[Frame, ...]


def record(
    engine: MeasuredEngine, request: Request, lengths: Sequence[int], tokenizer: Tokenizer
) -> Replay:
    """Decodes a prompt cycle by cycle.

    Args:
      engine: Compiled engine of the strategy.
      lengths: Acceptance lengths to force; empty leaves acceptance to verification.
    """
    engine.follow([lengths])
    slot = Slot(0, engine.layout.standing_pages(0))
    state = admit(engine, engine.new_state(), slot, request)
    decoder = IncrementalDecoder(tokenizer)
    first = decoder.push([int(jax.device_get(state.anchor)[0])])
    frames = []
    while jax.device_get(state.active)[0]:
        state, tokens, counts, proposal = engine.show_cycle(state)
        tokens, counts, proposal = jax.device_get((tokens, counts, proposal))
        committed = tokens[0, : counts[0]].tolist()
        parents = None if proposal.parents is None else proposal.parents[0]
        num_accepted, rejected = split(proposal.tokens[0].tolist(), parents, committed)
        texts = [decoder.push([token]) for token in committed]
        frames.append(
            Frame(
                tokens=len(committed),
                accepted=tuple(texts[:num_accepted]),
                bonus="".join(texts[num_accepted:]),
                rejected=tuple(tokenizer.decode([token]) for token in rejected),
            )
        )
    return Replay(first, tuple(frames))


def split(
    drafted: Sequence[int], parents: Sequence[int] | np.ndarray | None, committed: Sequence[int]
) -> tuple[int, list[int]]:
    """Splits a cycle's drafts into accepted and rejected ones.

    Args:
      drafted: Token of each draft.
      parents: Row that each draft continues, counted from the anchor; None for a chain.
    Returns:
      The number of accepted drafts, which come first in `committed`; and the tokens of the rejected
      drafts, in order.
    """
    parents = range(len(drafted)) if parents is None else parents
    row, taken = 0, set()
    for token in committed:
        children = [
            draft
            for draft, parent in enumerate(parents)
            if parent == row and drafted[draft] == token
        ]
        if not children:
            break
        taken.add(children[0])
        row = children[0] + 1
    return len(taken), [token for draft, token in enumerate(drafted) if draft not in taken]
