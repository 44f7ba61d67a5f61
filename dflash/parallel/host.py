"""Names that commands share with what they start: threads, and the TPU library without a TPU.

This module must not import jax.
"""

import os
import pathlib

COMPILING = "compiling"  # Begins the names of threads that compile programs.
# Stand-ins for a TPU machine's metadata, without which the library logs many warnings.
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
    """Silences the TPU library on hosts without a TPU.

    Call this before jax first looks up devices.
    """
    if not any(any(pathlib.Path("/dev").glob(pattern)) for pattern in _CHIPS):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
