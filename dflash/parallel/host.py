"""Hosts without TPUs on which the TPU library is installed, for its compiler. Imports no jax."""

import os
import pathlib

# What a TPU machine would answer; without it the library complains at length.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
_CHIPS = ("accel[0-9]*", "vfio/[0-9]*")  # below /dev


def quiet_without_tpu() -> None:
    """Keeps the TPU library silent where there is no chip; before jax first asks for devices."""
    if not any(any(pathlib.Path("/dev").glob(pattern)) for pattern in _CHIPS):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
