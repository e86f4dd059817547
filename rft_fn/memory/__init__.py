"""Memory of a run: estimated before it starts, and reported while it runs."""

from rft_fn.memory.estimate import Sampler, estimate
from rft_fn.memory.phases import Estimate, Example, Layout, host_memory, largest, report, table

__all__ = ["Example", "Layout", "estimate"]
