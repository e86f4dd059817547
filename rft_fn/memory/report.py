"""Memory for people: the table of an estimate, and the usage of a process."""

import os
import sys
from pathlib import Path

import torch

from rft_fn import dist
from rft_fn.memory.phases import Estimate, Phase

__all__ = ["host_memory", "report", "table"]

_NOTES = {
    "parameters": "",
    "gradients": "",
    "optimizer": "",
    "activations": "of a pack, when the forward is done",
    "head": "beside them, while the log-probs are computed",
    "backward": "beside both, at its peak",
    "gathered": "whole blocks, and buffers of their gradients",
    "update": "instead of the four above, while the optimizer steps",
    "media": "images and sounds",
    "rewards": "weights of reward models",
    "judges": "engines of judges",
}
_VERBS = {
    "generate": "sampling",
    "judge": "judging",
    "score": "scoring",
    "train": "training",
    "update": "updating",
    "sync": "weight sync",
}


def _size(n: float) -> str:
    if n >= 2**30:
        return f"{n / 2**30:.2f} GiB"
    return f"{n / 2**20:.1f} MiB"


def table(x: Estimate, *, available: int, host: int, remedy: str) -> str:
    """An estimate as a table, a line for each part, and whether it fits.

    `available` and `host` are the memory of the device and of the host [bytes]. `remedy` is printed where the
    device has too little.
    """
    notes = dict(_NOTES)
    notes["engine"] = "while it samples, asleep in host memory"
    if x.awake:
        notes["engine"] = "all the time"
    notes["host"] = f"of {_size(host)} of host memory"

    lines = []
    for name, note in notes.items():
        if getattr(x, name):
            lines.append(f"  {name:<12}{_size(getattr(x, name)):>11}  {note}")
    if x.placed:
        lines += [_line(phase) for phase in x.phases]
    lines += [f"  not known, and not counted: {line}" for line in x.unknown]

    # the last line compares the largest phase with what there is
    phase = _VERBS[x.largest.name]
    if x.host > host:
        verdict = "does not fit the host"
    elif x.total > available:
        verdict = f"does not fit: {remedy}"
    else:
        verdict = "fits"
    lines.append(f"  {'peak':<12}{_size(x.total):>11}  in {phase}, of {_size(available)}: {verdict}")
    return "\n".join(lines)


def _line(phase: Phase) -> str:
    """The peak of a phase, and the models that are on the device in it."""
    models = ", ".join(phase.models) or "no model"
    return f"  {'in ' + phase.name:<12}{_size(phase.total):>11}  {models} ({_size(phase.held)})"


def host_memory() -> int:
    """Host memory per process of this machine [bytes]."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _on_gpu() -> dict[str, int]:
    return {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def _on_host() -> dict[str, int]:
    import resource

    resident = 0
    statm = Path("/proc/self/statm")
    if statm.exists():  # on Linux
        resident = int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # where it is in KiB
        peak *= 1024
    return {"resident": resident, "peak": max(peak, resident)}  # the kernel counts its peak in batches


def report(prefix: str = "") -> dict[str, int]:
    """Memory that this process holds, by name [bytes]; rank 0 prints it.

    "allocated", "peak" and "reserved" of the GPU, or "resident" and "peak" of the process without one. The
    line that is printed has the largest over the ranks.
    """
    found = _on_gpu() if torch.cuda.is_available() else _on_host()
    most = dist.all_reduce(found, "max")
    if dist.is_main():
        text = ", ".join(f"{name} {n / 2**30:.2f} GiB" for name, n in most.items())
        if prefix:
            text = f"{prefix}: {text}"
        print(text, flush=True)
    return found
