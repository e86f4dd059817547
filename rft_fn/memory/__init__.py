"""Memory of a run: estimated before it starts, and reported while it runs."""

from rft_fn.memory.engines import Sampler
from rft_fn.memory.estimate import estimate
from rft_fn.memory.example import Example, Layout, largest
from rft_fn.memory.phases import Estimate
from rft_fn.memory.report import host_memory, report, table

__all__ = ["Example", "Layout", "estimate"]
