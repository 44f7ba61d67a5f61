"""Which implementation of an op runs: the Pallas kernel, or the plain-JAX reference.

The choice belongs to the platform that a program is *lowered* for, which need not be the one it is
traced on: a TPU program can be compiled on a CPU host.
"""

from collections.abc import Callable

import jax
from jax.experimental.pallas import tpu as pltpu

IMPLEMENTATIONS = ("auto", "reference", "pallas", "interpret")


def for_platform(platform: str) -> str:
    """The implementation for programs that run on one known platform.

    "auto" is right everywhere, but traces the reference and the kernel. Layers know their mesh; on
    what has no kernels of its own they save that work.

    Args:
      platform: of a `jax.Device`.
    """
    return "auto" if platform == "tpu" else "reference"


def run(
    implementation: str,
    *arrays,
    reference: Callable,
    pallas: Callable,
    unsupported: str | None = None,
):
    """Runs one implementation of an op.

    Args:
      implementation: "auto": Pallas where the program is lowered for a TPU and the kernel covers
        the case, the reference otherwise; or one of the others by name.
      *arrays: arguments of both.
      reference: called as `reference(*arrays)`.
      pallas: called as `pallas(*arrays, interpret=...)`; what it gets is for `pl.pallas_call`.
      unsupported: why the kernel does not cover this case; None if it does. "pallas" and
        "interpret" are then errors.
    Returns:
      What the implementation returns.
    Raises:
      ValueError: an unknown implementation, or one that does not cover the case.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {IMPLEMENTATIONS}")
    if implementation == "reference" or (implementation == "auto" and unsupported):
        return reference(*arrays)
    if unsupported:
        raise ValueError(f"{unsupported}; use implementation='reference'")
    if implementation == "interpret":
        return pallas(*arrays, interpret=interpret_params())
    if implementation == "pallas":
        return pallas(*arrays, interpret=False)

    def compiled(*arrays):
        return pallas(*arrays, interpret=False)

    return jax.lax.platform_dependent(*arrays, tpu=compiled, default=reference)


def interpret_params() -> pltpu.InterpretParams:
    """A TPU played on the host, strictly: races, stray reads and unwritten memory do not pass."""
    return pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )
