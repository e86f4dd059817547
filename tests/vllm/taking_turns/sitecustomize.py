"""Lets the threads of a server take turns sooner: Python reads this file when a process of it starts.

Requests reach vLLM's loop by a thread of the same process. On a CPU a step of a small model gives Python's
lock away for microseconds at a time, so that the thread may wait until nothing is left to run: a pause then
takes effect when all requests have ended.
"""

import sys

sys.setswitchinterval(1e-4)  # seconds; 5e-3 by default
