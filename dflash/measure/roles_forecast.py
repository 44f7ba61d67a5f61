"""Forecast of the gaps between dispatches of running requests while another prompt is prefilled.

    one server             a chunk of the prompt before every dispatch, until the prompt is complete
    one for each role      one dispatch waits until the rows of the whole prompt are written

The host's time, and the drafter's part of a prefill, are not included.
"""

import jax

from dflash.drafters.base import Drafter
from dflash.loading import decode_plan
from dflash.measure import roofline
from dflash.measure.roofline import ForwardWork, Machine
from dflash.models.decoder import Decoder


def cycle_ms(
    target: Decoder, drafter: Drafter, machine: Machine, *, batch: int, context: int
) -> float:
    """Returns the least time of a cycle of `batch` sequences after `context` tokens each."""
    rows = drafter.num_draft_tokens + 1
    verify = roofline.target_work(target, batch=batch, rows=rows, context=context)
    draft = roofline.draft_work(target, drafter, batch=batch)
    return verify.ideal_ms(machine) + draft.ideal_ms(machine)


def chunks_ms(target: Decoder, machine: Machine, *, prompt: int, chunk: int) -> list[float]:
    """Returns the least time of each chunk of a prompt of `prompt` tokens."""
    return [
        _chunk_work(target, rows=min(chunk, prompt - done), context=done).ideal_ms(machine)
        for done in range(0, prompt, chunk)
    ]


def _chunk_work(target: Decoder, *, rows: int, context: int) -> ForwardWork:
    """Returns the work of a chunk, whose last row alone gets logits."""
    # On average, a row attends to half of its own chunk.
    work = roofline.target_work(target, batch=1, rows=rows, context=context - rows // 2)
    unneeded = roofline.head_work(target, rows).flops - roofline.head_work(target, 1).flops
    return ForwardWork(work.flops - unneeded, work.size_bytes)


def rows_bytes(target: Decoder, drafter: Drafter, *, prompt: int, max_length: int) -> int:
    """Returns the bytes that a prompt leaves behind for the decoding side.

    Args:
      target: Target, whose rows of the prompt travel.
      drafter: Drafter, whose state of a whole sequence travels.
      prompt: Tokens of the prompt.
      max_length: Positions of a sequence.
    """
    cache = target.new_cache(batch=1, pages_per_sequence=1, num_pages=1, page_size=1)
    state = jax.eval_shape(lambda: drafter.init_state(1, max_length))
    own = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return prompt * decode_plan.measure(cache.pools).total_bytes + own


def write_ms(machine: Machine, size_bytes: float) -> float:
    """Returns the least time in which rows are read once and written once on the device."""
    return 2e3 * machine.read_s(size_bytes)
