"""Settings of the C library's allocator, for programs that run on a CPU."""

import ctypes
import functools

LARGEST = 256 * 2**20  # Bytes of the largest block that is kept.

# Of <malloc.h> of glibc.
_MXFAST, _TRIM_THRESHOLD, _MMAP_THRESHOLD = 1, -1, -3


@functools.cache
def tune_malloc() -> bool:
    """Fits glibc's allocator to XLA's programs; returns False where a setting is not possible.

    XLA allocates the scratch memory of a program at every call, and frees it afterwards. By default
    glibc returns blocks of more than 32 MiB to the system, so that the next call has a page fault
    for every page that it touches. With these settings they stay in the process, which keeps up to
    twice `LARGEST` bytes more.

    A call also allocates a small block for every constant of its program, of which there may be a
    thousand. By default glibc keeps the freed ones apart in bins, and merges all of them when a
    large block is allocated, which is at the next call. Now each is merged when it is freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: LARGEST, _TRIM_THRESHOLD: 2 * LARGEST, _MXFAST: 0}
    # Older versions refuse such a threshold, and return 0.
    accepted = [mallopt(name, size) == 1 for name, size in settings.items()]
    return all(accepted)
