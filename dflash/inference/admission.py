"""Admission of a sequence into a slot in one call, outside a scheduler."""

from collections.abc import Sequence

from dflash.inference.cycle.state import DecodeState
from dflash.inference.engine import Engine
from dflash.inference.pages import Slot
from dflash.inference.prefill import PrefillChunk
from dflash.inference.request import Request


def admit(
    engine: Engine,
    state: DecodeState,
    slot: Slot,
    request: Request,
    output_ids: Sequence[int] = (),
) -> DecodeState:
    """Prefills a whole prompt and inserts it into a slot; consumes `state`.

    Args:
      engine: Engine of the state.
      state: State of the batch.
      slot: Empty slot, with the pages that the next dispatch may fill.
      request: Request of the sequence.
      output_ids: Output so far, whose last token becomes the anchor; empty for a new sequence.
    Raises:
      ValueError: The prompt is empty or leaves no room for output, or the slot has more pages than
        a sequence may own.
    """
    layout = engine.layout
    engine.page_row(slot)  # Checks the pages.
    prefill_state, prefill_slot = engine.new_prefill_state(), layout.replica_of(slot.index)
    token_ids = (*request.prompt, *output_ids)
    length = len(request.prompt) + max(len(output_ids) - 1, 0)
    if not 0 < length < layout.max_length:
        raise ValueError(f"prompt of {length} tokens, expected 1 to {layout.max_length - 1}")
    for start in range(0, length, layout.longest_chunk):
        end = min(start + layout.longest_chunk, length)
        options = {"fresh": not start, "adapter": request.adapter}
        chunk = PrefillChunk.of(token_ids, start, end, slot, request.sampling, **options)
        state, prefill_state, anchors, _ = engine.prefill(
            state, prefill_state, {prefill_slot: chunk}
        )
    return engine.insert(state, prefill_state, anchors, prefill_slot, slot, request, output_ids)
