"""The seconds of a step, in all and by phase, and the peak of memory."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Timing"]


class Timing:
    """Counts the seconds between two rows of timing.jsonl."""

    def __init__(self) -> None:
        self.since = time.perf_counter()  # the last row
        self.phases: dict[str, float] = {}  # seconds since then
        self.beside: dict[str, float] = {}  # seconds since then of work that this process did not wait for

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under `name`."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - before

    def row(self, tokens: int) -> dict[str, float]:
        """The row of a step that processed `tokens`; the next one is counted from here."""
        now = time.perf_counter()
        seconds = now - self.since
        row = {
            "seconds": seconds,
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "peak_gib": _peak_gib(),
        }
        row |= {f"phase/{name}": x for name, x in self.phases.items()}
        row |= {f"beside/{name}": x for name, x in self.beside.items()}
        self.since = now
        self.phases = {}
        self.beside = {}
        return row


def _peak_gib() -> float:
    """The peak memory of this process [GiB]: of its GPU, or without one of the host."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    # macOS counts bytes, Linux KiB
    unit = 20
    if sys.platform == "darwin":
        unit = 30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**unit
