"""Seconds of the phases of a step, by the clock on the wall and by the processor; the peak of memory."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

PHASES = ("generate", "judge", "score", "gradients", "update", "sync")


class Clock:
    """Adds up seconds by phase; a phase within a phase counts for itself alone."""

    def __init__(self, device: str):
        self.device = device
        self.open: list[tuple[str, float, float]] = []
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.wall = dict.fromkeys(PHASES, 0.0)
        self.cpu = dict.fromkeys(PHASES, 0.0)

    def row(self, *, prompt: int, response: int) -> dict[str, Any]:
        """The step that ends here, and the tokens that it had."""
        return {"wall": dict(self.wall), "cpu": dict(self.cpu), "prompt": prompt, "response": response}

    def now(self) -> tuple[float, float]:
        """(seconds on the wall, seconds of this process's threads), when the device has done its work."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block under `name`."""
        wall, cpu = self.now()
        self.open.append((name, 0.0, 0.0))
        try:
            yield
        finally:
            end, spent = self.now()
            _, inner, inner_cpu = self.open.pop()
            self.wall[name] += end - wall - inner
            self.cpu[name] += spent - cpu - inner_cpu
            if self.open:
                outer, w, c = self.open[-1]
                self.open[-1] = (outer, w + end - wall, c + spent - cpu)

    def around(self, owner: Any, method: str, name: str) -> None:
        """Count every call of owner.method under `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        @wraps(inner)
        def counted(*args: Any, **options: Any) -> Any:
            with self.phase(name):
                return inner(*args, **options)

        setattr(owner, method, counted)


def peak_bytes(device: str) -> int:
    """The most memory that this process held: of its GPU, or else of the host."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def allocator() -> str:
    """The allocator of this process, with its settings where they are not the usual ones."""
    import os

    name = "jemalloc" if hasattr(ctypes.CDLL(None), "mallctl") else "malloc of the system"
    given = {k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "LD_PRELOAD"))}
    return " ".join([name, *(f"{k}={v}" for k, v in sorted(given.items()))])
