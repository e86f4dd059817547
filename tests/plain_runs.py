"""Runs of scripts whose pictures and forecasts no test looks at: those take most of a short run."""

import importlib

__all__ = ["leave_out"]

PARTS = ("plot.curve", "plot.length_histogram", "plot.phases", "plot.reliability", "print_preflight")


def nothing(*_, **__):
    """What a part does that is left out."""


def leave_out(put=setattr):
    """Scripts draw no curves and forecast no memory from now on: (owner, name, function) of each part."""
    run = importlib.import_module("rft_fn.run")
    parts = []
    for path in PARTS:
        module, _, name = path.rpartition(".")
        owner = getattr(run, module) if module else run
        parts.append((owner, name, getattr(owner, name)))
        put(owner, name, nothing)
    return parts
