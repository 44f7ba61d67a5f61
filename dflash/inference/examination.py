"""Examination of a sequence whose logits are not finite: finds the first layer to blame."""

from collections.abc import Sequence

import jax
import numpy as np

from dflash import errors
from dflash.inference.engine import Engine
from dflash.inference.logits import nonfinite
from dflash.inference.prefill import padded
from dflash.inference.request import Request


def explain(
    engine: Engine, request: Request, output_ids: Sequence[int]
) -> tuple[errors.NumericsError, bool]:
    """Explains why the next logits of a sequence are not finite.

    Runs the sequence once more, alone and with every layer tapped.

    Args:
      engine: The engine that has decoded the sequence.
      request: The sequence.
      output_ids: Its output so far.
    Returns:
      The error of the sequence, and whether its logits are not finite when computed once more.
    """
    tokens, finite = (*request.prompt, *output_ids), True
    rows = engine.layout.longest_chunk
    try:
        cache = engine.program("new_examined")()
        run = engine.program("examine", rows)
        for start in range(0, len(tokens), rows):
            part = tokens[start : start + rows]
            where = np.int32(start), np.int32(len(part)), np.int32(request.adapter)
            cache, now = run(engine.target_params, cache, padded(part, rows)[None], *where)
            finite = finite & jax.device_get(now)
    except jax.errors.JaxRuntimeError:
        finite = None
    error = nonfinite.error(engine.target, request, output_ids, finite)
    return error, finite is None or not all(finite)
