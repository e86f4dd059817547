"""The processor cores that this process may use."""

import os
from pathlib import Path

__all__ = ["of_rank", "usable"]

_CGROUP = Path("/sys/fs/cgroup")


def usable() -> int:
    """Return how many cores this process may use: of its affinity, and of its container's quota."""
    ask = getattr(os, "sched_getaffinity", None)
    cores = len(ask(0)) if ask is not None else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota() -> float | None:
    """Return the cores of the container's quota; None without one."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()  # "max 100000" without a quota
        return int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota, period = (int((_CGROUP / "cpu" / f"cpu.cfs_{x}_us").read_text()) for x in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None


def of_rank(most: int = 8) -> int:
    """Return the share of this rank in the cores, as a number of processes: at least 1, at most `most`."""
    return max(1, min(most, usable() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
