"""The table of an estimate, for people."""

from rft_fn.memory.phases import Estimate

__all__ = ["table"]


_NOTES = {
    "parameters": "",
    "gradients": "",
    "optimizer": "",
    "activations": "of a pack, when the forward is done",
    "head": "beside them, while the log-probs are computed",
    "backward": "beside both, at its peak",
    "gathered": "whole blocks, and buffers of their gradients",
    "update": "instead of the four above, while the optimizer steps",
    "media": "images and sounds",
    "rewards": "weights of reward models",
    "judges": "engines of judges",
}
_VERBS = {
    "generate": "sampling",
    "judge": "judging",
    "score": "scoring",
    "train": "training",
    "update": "updating",
    "sync": "weight sync",
}


def _size(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def table(x: Estimate, *, available: int, host: int, remedy: str) -> str:
    """Format an estimate as a table, a line for each part, and whether it fits.

    `available` and `host` are the memory of the device and of the host [bytes]. `remedy` is printed if the
    device has too little.
    """
    notes = dict(_NOTES)
    notes["engine"] = "all the time" if x.awake else "while it samples, asleep in host memory"
    notes["host"] = f"of {_size(host)} of host memory"

    lines = []
    for name, note in notes.items():
        if getattr(x, name):
            lines.append(f"  {name:<12}{_size(getattr(x, name)):>11}  {note}")
    if x.placed:
        for phase in x.phases:
            models = ", ".join(phase.models) or "no model"
            lines.append(
                f"  {'in ' + phase.name:<12}{_size(phase.total):>11}  {models} ({_size(phase.held)})"
            )
    lines += [f"  not known, and not counted: {line}" for line in x.unknown]

    # the last line compares the largest phase with what there is
    if x.host > host:
        verdict = "does not fit the host"
    elif x.total > available:
        verdict = f"does not fit: {remedy}"
    else:
        verdict = "fits"
    verb = _VERBS[x.largest.name]
    lines.append(f"  {'peak':<12}{_size(x.total):>11}  in {verb}, of {_size(available)}: {verdict}")
    return "\n".join(lines)
