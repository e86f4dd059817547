"""Settings of this process that a strategy changes: deterministic algorithms, and what malloc keeps."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["deterministic_algorithms", "disable_malloc_trim"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Have torch use deterministic algorithms, or raise where it has none, and restore its settings.

    On CUDA sums by index, and the gradients of attention, then add up in one order. Products need a fixed
    workspace of cuBLAS, which reads its variable when it first computes.
    """
    memory: Any = torch.utils.deterministic
    mode, filled = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    workspace = os.environ.get(_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it costs a pass, and nobody reads it
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = filled
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


# names and values of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGE = 1 << 30  # bytes from which on an allocation is the system's own, and goes back to it at once


def disable_malloc_trim() -> bool:
    """Have this process keep the memory that it frees, in blocks of up to 1 GiB.

    Returns True where that works: with glibc. A gradient frees its activations, and the next pack needs as
    much. By default glibc hands large blocks back to the system, which gives them out again page by page,
    each filled with zeros.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE) and mallopt(_TRIM_THRESHOLD, _NEVER))
