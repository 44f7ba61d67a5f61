"""Times how long a decode program takes to compile, and to start.

    python tools/time_dispatch.py configs/tiny_dflash.yml drafter.block_size=auto

No sequence is active, so that a dispatch runs no cycle. Prints for each program that decodes the
seconds of its compilation, the number of its constants, and the milliseconds of a dispatch: the
median of all. The memory allocator matters: compare with `LD_PRELOAD=libjemalloc.so.2`.
"""

import argparse
import io
import re
import statistics
import time

import jax
import numpy as np

from dflash.config import loader
from dflash.inference import program_table
from dflash.inference.cycle import dispatch
from dflash.loading import job as jobs

_COMPUTATION = re.compile(r"^(?:ENTRY )?%[\w.\-]+ \(.*?^\}", re.MULTILINE | re.DOTALL)
_CONSTANT = re.compile(r" = \S+ constant\(")


def main() -> None:
    """Prints a line per program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="config of decoding")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--calls", type=int, default=200, help="calls of each program")
    args = parser.parse_args()
    config = loader.load(args.config, [*args.overrides, "decode.baseline=false"])
    job = jobs.prepare(config, stdin=io.StringIO())
    job.load_weights()
    engine = job.engine()
    seconds = np.ones(engine.shapes.seconds().shape, np.float32)
    for name in ("generate", "generate" + program_table.FOR_GREEDY):
        begin = time.perf_counter()
        program = engine.program(name)
        compiled = time.perf_counter() - begin
        state, milliseconds = engine.program("new_state")(seconds), []
        for _ in range(args.calls):
            begin = time.perf_counter()
            params = engine.target_params, engine.drafter_params
            state, report = jax.block_until_ready(program(*params, state, np.int32(dispatch.ANY)))
            milliseconds.append(1e3 * (time.perf_counter() - begin))
            assert not report.cycles
        print(
            f"{name}: compiled in {compiled:.1f} s, {_num_constants(program)} constants, "
            f"{statistics.median(milliseconds):.2f} ms per dispatch without cycles",
            flush=True,
        )


def _num_constants(program: jax.stages.Compiled) -> int:
    """Returns the number of constants for which a call allocates a block: those not in fusions."""
    text = program.as_text()
    inlined = set(re.findall(r"(?:calls|to_apply)=(%[\w.\-]+)", text))
    bodies = (match.group() for match in _COMPUTATION.finditer(text))
    return sum(
        len(_CONSTANT.findall(body))
        for body in bodies
        if body.removeprefix("ENTRY ").partition(" ")[0] not in inlined
    )


if __name__ == "__main__":
    main()
