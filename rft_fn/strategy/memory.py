"""What a process holds in memory."""

import sys
from pathlib import Path

import torch

from rft_fn import dist

__all__ = ["report"]


def report(prefix: str = "") -> dict[str, int]:
    """{"allocated", "peak", "reserved"} of the GPU, or {"resident", "peak"} of the process without one
    [bytes], this rank's; and one line with the largest over the ranks on rank 0."""
    if torch.cuda.is_available():
        found = {
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
    else:
        import resource

        statm = Path("/proc/self/statm")  # not there off Linux
        pages = int(statm.read_text().split()[1]) if statm.exists() else 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        resident = pages * resource.getpagesize()
        found = {"resident": resident, "peak": max(peak, resident)}  # the kernel counts its peak in batches
    most = dist.all_reduce(found, "max")
    if dist.is_main():
        text = ", ".join(f"{name} {n / 2**30:.2f} GiB" for name, n in most.items())
        print(f"{prefix + ': ' if prefix else ''}{text}", flush=True)
    return found
