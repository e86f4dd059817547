"""One side's steps, in a process of its own: python tests/bench/step/worker.py SIDE CASE, as JSON."""

import json
import sys
from importlib import import_module
from typing import Any

from case import Case
from clock import Clock, allocator, peak_bytes

SIDES = {"rft_fn": "ours", "every_token": "every_token", "trl": "peer", "products": "limit"}


def measure(side: str, case: Case) -> dict[str, Any]:
    """Seconds of each measured step by phase, its tokens, and the peak of this process."""
    clock = Clock(case.device)
    rows = import_module(SIDES[side]).steps(case, clock)
    return {"steps": rows[1:], "peak": peak_bytes(case.device), "allocator": allocator()}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Case(**json.loads(sys.argv[2])))))
