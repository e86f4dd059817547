"""Memory of a run: estimated before it starts, and reported while it runs."""

from rft_fn.memory.backend_layout import Layout
from rft_fn.memory.estimate import Sampler, estimate
from rft_fn.memory.estimate_table import table
from rft_fn.memory.media_example import Example, largest
from rft_fn.memory.phases import Estimate
from rft_fn.memory.process_memory import free, host_free, host_memory, report

__all__ = ["Example", "Layout", "estimate"]
