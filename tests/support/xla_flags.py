"""Flags of XLA that stand before jax is imported: CPU devices, and quick compilation."""

import importlib.metadata
import os


def quick(devices: int) -> str:
    """The value of XLA_FLAGS for so many CPU devices, and for programs that compile quickly.

    Tests compile many tiny programs and run each a few times. What XLA_FLAGS has is kept.
    """
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices}",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # With this and the next it takes less than half the time (7.0 against 3.0 s for an engine).
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # Later ones have no other way, and abort at a flag that they do not know.
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags).strip()
