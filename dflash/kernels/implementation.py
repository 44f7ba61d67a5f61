"""Choice between the implementations of an op: Pallas kernel, C++ kernel or plain-JAX reference.

The choice depends on the platform that a program is *lowered* for, which may differ from the one
that traces it: a TPU program can be compiled on a CPU host.
"""

from collections.abc import Callable

import jax
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import library_cpu
from dflash.parallel.sharding import Sharding

IMPLEMENTATIONS = ("auto", "reference", "pallas", "interpret", "cpu")


def for_platform(platform: str) -> str:
    """Returns the implementation for programs that run on a known platform.

    "auto" works everywhere, but traces both the reference and the kernel. Layers know their mesh,
    so on platforms without kernels they skip tracing the kernel.

    Args:
      platform: Platform of a `jax.Device`.
    """
    return "auto" if platform == "tpu" else "reference"


def on(sharding: Sharding) -> str:
    """Returns the implementation on a mesh of an op that has a kernel in C++, too."""
    return "cpu" if library_cpu.serves(sharding) else for_platform(sharding.platform)


def run(
    implementation: str,
    *arrays,
    reference: Callable,
    pallas: Callable,
    unsupported: str | None = None,
    cpu: Callable | None = None,
):
    """Runs one implementation of an op.

    Args:
      implementation: One of `IMPLEMENTATIONS`. "auto" runs the kernel if the program is lowered for
        a TPU and the kernel supports the case, and the reference otherwise. "cpu" runs the C++
        kernel if there is one for the case, and the reference otherwise.
      reference: Reference, called as `reference(*arrays)`.
      pallas: Kernel, called as `pallas(*arrays, interpret=...)`, where `interpret` is an argument
        of `pl.pallas_call`.
      unsupported: Reason why the kernel does not support this case, which makes "pallas" and
        "interpret" errors; None if it does.
      cpu: Kernel in C++, called as `cpu(*arrays)`; None if there is none for this case.
    Raises:
      ValueError: The implementation is unknown or does not support the case.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    if implementation == "cpu":
        return (cpu or reference)(*arrays)
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


def check_shapes(op: str, expected: dict, heads: int = 1, kv_heads: int = 1) -> None:
    """Checks the arguments of an op.

    Args:
      expected: Array and expected shape by the array's name.
    Raises:
      ValueError: A shape differs, or the heads do not divide into groups.
    """
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{op}: {name} is {array.shape}, expected {shape}")
    if heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads, expected a multiple of {kv_heads} kv heads")


def interpret_params() -> pltpu.InterpretParams:
    """Returns parameters of a strict interpreter, which detects races and invalid reads."""
    return pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )
