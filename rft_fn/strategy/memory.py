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

        resident = 0
        statm = Path("/proc/self/statm")
        if statm.exists():  # on Linux
            resident = int(statm.read_text().split()[1]) * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform != "darwin":  # where it is in KiB
            peak *= 1024
        found = {"resident": resident, "peak": max(peak, resident)}  # the kernel counts its peak in batches
    most = dist.all_reduce(found, "max")
    if dist.is_main():
        text = ", ".join(f"{name} {n / 2**30:.2f} GiB" for name, n in most.items())
        print(": ".join(filter(None, [prefix, text])), flush=True)
    return found
