"""Memory that the C library keeps, for programs that run on a CPU."""

import ctypes
import functools

LARGEST = 256 * 2**20  # Bytes of the largest block that is kept.

# Of <malloc.h> of glibc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@functools.cache
def keep_freed() -> bool:
    """Makes glibc keep freed blocks in the process; returns False where that is not possible.

    XLA allocates the scratch memory of a program at every call, and frees it afterwards. By default
    glibc returns blocks of more than 32 MiB to the system, so that the next call has a page fault
    for every page that it touches. The process keeps up to twice `LARGEST` bytes more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    thresholds = {_MMAP_THRESHOLD: LARGEST, _TRIM_THRESHOLD: 2 * LARGEST}
    # Older versions refuse such a threshold, and return 0.
    accepted = [mallopt(name, size) == 1 for name, size in thresholds.items()]
    return all(accepted)
