"""Programs that nobody has read: run apart where the machine allows that, with limits anywhere.

`run` is the whole of it: a command and its input become an `Outcome`. `launcher` is the process between this
one and the program, `call_tests` the one that tests a Python function without giving it the verdict.
"""

from rft_fn.sandbox.program import Limits, Outcome, kill_group, run

__all__ = ["Limits", "Outcome", "kill_group", "run"]
