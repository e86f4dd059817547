"""The memory of this process and of its host."""

import os
import sys
from pathlib import Path

import torch

from rft_fn import dist

__all__ = ["free", "host_free", "host_memory", "report"]


def host_memory() -> int:
    """Return host memory per process of this machine [bytes]."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_free() -> int:
    """Return the host memory that is free or only a cache of files, within the container's limit [bytes]."""
    about = Path("/proc/meminfo")
    if not about.exists():
        return host_memory()
    lines = dict(line.split(":", 1) for line in about.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" without one
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    return min(free, limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)))


def free(device: torch.device) -> int:
    """Return the memory of a device that this process has, or could take now [bytes].

    Without a GPU that of the host, per process of this machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return min(host_free() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + _resident(), host_memory())


def _resident() -> int:
    statm = Path("/proc/self/statm")  # on Linux
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _used() -> dict[str, int]:
    """Return the memory of this process, on the GPU if there is one."""
    if torch.cuda.is_available():
        return {
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
    import resource

    resident = _resident()
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"resident": resident, "peak": max(peak, resident)}  # the kernel counts its peak in batches


def report(prefix: str = "") -> dict[str, int]:
    """Return the memory that this process holds, by name [bytes]; rank 0 prints it.

    "allocated", "peak" and "reserved" of the GPU, or "resident" and "peak" of the process without one. The
    line that is printed has the largest over the ranks.
    """
    used = _used()
    most = dist.all_reduce(used, "max")
    if dist.is_main():
        text = ", ".join(f"{name} {n / 2**30:.2f} GiB" for name, n in most.items())
        print(f"{prefix}: {text}" if prefix else text, flush=True)
    return used
