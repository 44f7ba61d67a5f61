"""Examination of a sequence whose logits are not finite: finds the first layer to blame."""

from collections.abc import Sequence

import jax
import numpy as np

from dflash import errors
from dflash.inference import nonfinite
from dflash.inference.engine import Engine
from dflash.inference.prefill import padded
from dflash.inference.request import Request


def explain(engine: Engine, request: Request, output_ids: Sequence[int]) -> errors.NumericsError:
    """Returns the error of a sequence whose next logits are not finite.

    Runs the sequence once more, alone and with every layer tapped.

    Args:
      engine: The engine that has decoded the sequence.
      request: The sequence.
      output_ids: Its output so far.
    """
    tokens, finite = (*request.prompt, *output_ids), True
    rows = engine.layout.longest_chunk
    try:
        cache = engine.program("new_examined")()
        run = engine.program("examine", rows)
        for start in range(0, len(tokens), rows):
            part = tokens[start : start + rows]
            where = np.int32(start), np.int32(len(part))
            cache, now = run(engine.target_params, cache, padded(part, rows)[None], *where)
            finite = finite & jax.device_get(now)
    except jax.errors.JaxRuntimeError:
        finite = None
    return nonfinite.error(engine.target, request, output_ids, finite)
