"""The table of an estimate, for people."""

from rft_fn.memory.phases import Estimate

__all__ = ["size", "table"]


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


def size(n: float) -> str:
    """Return bytes as people read them."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def table(
    x: Estimate,
    *,
    available: int,
    host: int,
    remedy: str,
    row: int | None = None,
    window: int | None = None,
    free: int = 0,
) -> str:
    """Format an estimate as a table, a line for each part, and whether it fits.

    `available` and `host` are the memory of the device and of the host [bytes]. `remedy` is printed if the
    device has too little. `row` is the longest row that fits in the `free` bytes of the device, of a model
    that reads `window` tokens.
    """
    notes = dict(_NOTES)
    notes["engine"] = "all the time" if x.awake else "while it samples, asleep in host memory"
    notes["host"] = f"of {size(host)} of host memory"

    lines = []
    for name, note in notes.items():
        if getattr(x, name):
            lines.append(f"  {name:<12}{size(getattr(x, name)):>11}  {note}")
    if x.placed:
        for phase in x.phases:
            models = ", ".join(phase.models) or "no model"
            lines.append(f"  {'in ' + phase.name:<12}{size(phase.total):>11}  {models} ({size(phase.held)})")
    lines += [f"  not known, and not counted: {line}" for line in x.unknown]

    if row is not None:
        limit = ", all that the model reads" if row == window else ""
        lines.append(f"  {'longest row':<12}{row:>11,}  tokens, in the {size(free)} that are free{limit}")

    # the last line compares the largest phase with what there is
    if x.host > host:
        verdict = "does not fit the host"
    elif x.total > available:
        verdict = f"does not fit: {remedy}"
    else:
        verdict = "fits"
    verb = _VERBS[x.largest.name]
    lines.append(f"  {'peak':<12}{size(x.total):>11}  in {verb}, of {size(available)}: {verdict}")
    return "\n".join(lines)
