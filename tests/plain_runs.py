"""Runs of scripts whose pictures and forecasts no test looks at: those take most of a short run."""

import importlib

__all__ = ["PARTS", "leave_out", "nothing"]

PARTS = ("plot.curve", "plot.length_histogram", "plot.phases", "plot.reliability", "print_preflight")


def nothing(*_, **__):
    """What a part does that is left out."""


def leave_out():
    """Scripts draw no curves and forecast no memory from now on; for a process that ends with its run."""
    run = importlib.import_module("rft_fn.run")
    for name in PARTS:
        *modules, function = name.split(".")
        owner = run
        for module in modules:
            owner = getattr(owner, module)
        setattr(owner, function, nothing)
