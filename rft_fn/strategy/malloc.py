"""Memory of the host that is freed and soon needed again."""

import ctypes
import sys

__all__ = ["keep_freed"]

# names and values of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGE = 1 << 30  # bytes from which on an allocation is the system's own, and goes back to it at once


def keep_freed() -> bool:
    """Have this process keep the memory that it frees, in blocks of up to 1 GiB.

    Returns whether it does from then on: only with glibc. A gradient frees its activations, and the next pack
    needs as much. By default glibc hands large blocks back to the system, which gives them out again page by
    page, each filled with zeros. Again is no different.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE) and mallopt(_TRIM_THRESHOLD, _NEVER))
