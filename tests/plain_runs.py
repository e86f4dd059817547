"""Runs of scripts whose pictures, forecasts and canaries no test looks at: those take most of a short run."""

import importlib
from functools import reduce

__all__ = ["leave_out"]

SILENT = ("plot.curve", "plot.length_histogram", "plot.phases", "plot.reliability", "print_preflight")


def nothing(*_, **__):
    """What a part does that is left out."""


def only_sent(st, state, engine, *_, version, **__):
    """`sync.canary` without its noise: the engine has the weights."""
    sync = importlib.import_module("rft_fn.sync")
    sync.push(st, state, engine, version=version)
    return sync.Probe(noisy=0.0, floor=0.0, seconds=0.0, key=0)


def leave_out(put=setattr):
    """Scripts draw no curves, forecast no memory and have no canary from now on.

    Gives (owner, name, function) of each part, to put it back.
    """
    instead = {f"run.{path}": nothing for path in SILENT} | {"sync.canary": only_sent}
    parts = []
    for path, function in instead.items():
        module, _, name = path.rpartition(".")
        owner = reduce(getattr, module.split("."), importlib.import_module("rft_fn"))
        parts.append((owner, name, getattr(owner, name)))
        put(owner, name, function)
    return parts
