"""Dispatches with sequences whose outputs must match grammars.

Only the host can compute which tokens a grammar allows after a draft. So the first cycle of such a
dispatch stops between draft and verification: the host reads the drafts and computes a mask of the
allowed tokens for each row. The other sequences then continue to the end of the dispatch.
"""

from collections.abc import Mapping

import jax
import numpy as np

from dflash.inference import first_token
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.engine import Engine
from dflash.inference.in_flight import ActiveRequest


def masked_cycle(
    engine: Engine, state: DecodeState, ready: Mapping[int, ActiveRequest]
) -> tuple[DecodeState, Report]:
    """Runs one cycle of the constrained sequences; consumes `state`.

    Args:
      ready: Constrained sequences by slot, with matchers that have consumed all of their output.
        Other sequences wait, and so does one whose matcher raises an exception, which becomes the
        sequence's error.
    """
    state, proposal = engine.draft(state)
    tokens, parents = jax.device_get((proposal.tokens, proposal.parents))
    slots, rows = len(tokens), tokens.shape[1] + 1
    allowed = np.tile(first_token.allow_all(engine.vocab_size), (slots, rows, 1))
    for slot, active in ready.items():
        with active.failing():
            active.matcher.fill(
                allowed[slot],
                tokens[slot].tolist(),
                None if parents is None else parents[slot].tolist(),
                ends=active.request.stop_ids,
                first_end=active.request.min_new_tokens,
            )
    masked = [slot for slot, active in ready.items() if active.error is None]
    return engine.conclude(state, proposal, allowed, np.isin(np.arange(slots), masked))
