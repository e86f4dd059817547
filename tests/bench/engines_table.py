"""The tables of docs/engines.md, from docs/results/engines.json: `python tests/bench/engines.py --write`."""

import statistics

from record import put


def spread(seconds, scale=1.0):
    """The median of scale / seconds, with the least and the most."""
    rates = sorted(scale / s for s in seconds)
    return f"{statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})"


def seconds(values):
    """The median, with the least and the most where there are several."""
    middle = statistics.median(values)
    digits = 4
    for limit in (0.01, 1.0):
        digits -= middle >= limit
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def rollouts(found):
    """A row for each engine: sampling alone, and a step of training with it."""
    tokens = found["prompts"] * found["group"] * found["max_new"]
    update = statistics.median(found["update"])
    hf = statistics.median(found["rollout"]["hf"])
    lines = [
        "| engine | tokens/s of sampling | to hf | a step: sampling + update + sync [s] "
        "| tokens/s of the step |",
        "|---|---|---|---|---|",
    ]
    for name, each in found["rollout"].items():
        mine, sent = statistics.median(each), statistics.median(found["sync"][name]["seconds"])
        step = mine + update + sent
        lines.append(
            f"| {name} | {spread(each, tokens)} | {hf / mine:.1f} x | {mine:.1f} + {update:.1f} + {sent:.1f} "
            f"= {step:.1f} | {tokens / step:.0f} |"
        )

    # the engine samples and loads while the trainer updates: both are in the same seconds
    steps = sorted(found["ahead"], key=lambda x: x["step"])
    middle = steps[len(steps) // 2]
    busy = [x["engine_busy"] for x in steps]
    waits = (
        f"trainer waits {middle['trainer_waits']:.1f}, engine {middle['step'] - middle['engine_busy']:.1f}"
    )
    lines.append(
        f"| vLLM in its own process, one step ahead | {spread(busy, tokens)}, beside the update "
        f"| {hf / statistics.median(busy):.1f} x | {middle['step']:.1f}: {waits} "
        f"| {tokens / middle['step']:.0f} |"
    )
    return lines


SYNCS = {
    "hf": ("hf", "a copy in the process"),
    "vLLM in process": ("vLLM in process", "its layerwise reload"),
    "vLLM in its own process": ("vLLM in its own process", "shared memory, then the reload"),
    "vLLM server": ("a vLLM server", "a folder of safetensors, then the reload"),
}


def syncs(found):
    """A row for each engine."""
    lines = ["| to | by | tensors | MB | seconds |", "|---|---|---|---|---|"]
    for name, (to, by) in SYNCS.items():
        x = found["sync"][name]
        lines.append(f"| {to} | {by} | {x['tensors']} | {x['bytes'] / 1e6:.0f} | {seconds(x['seconds'])} |")
    return lines


def guards(found):
    """A row for each guard."""
    x = found["guards"]
    rows = {
        "the export itself, for comparison": seconds(x["export"]),
        "manifest: names, shapes, types, finite numbers before sending, every sync": seconds(x["manifest"]),
        "arrival: the same in the engine, and the count of its layers, every sync": seconds(x["arrival"]),
        "probe: log-probs of the update against the sampler's, every step": seconds(x["comparison"]),
        "with a correction, the forward pass that scores a rollout": seconds(x["scoring"]),
    }
    for name in ("hf", "vLLM in process"):
        noisy, floor = x[f"canary gaps, {name}"]
        what = f"canary of {name}, at the start: gaps of {noisy:.1e} with noise and {floor:.1e} without"
        rows[what] = f"{x[f'canary, {name}'][0]:.1f}"
    return ["| guard | seconds |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def tables(found):
    """The tables of docs/engines.md, and what they were measured on."""
    about = (
        f"{found['machine']}, {found['cores']} cores, {found['threads']} threads for each engine and for the "
        f"trainer (one step ahead: one for each side), torch {found['torch']}, vLLM {found['vllm']}, "
        f"{found['date']}. {found['prompts']} prompts x {found['group']} samples x {found['max_new']} tokens "
        f"of SmolLM2-135M in float32, {found['times']} times in turns: medians, and the least and the most."
    )
    return "\n".join([about, "", *rollouts(found), "", *syncs(found), "", *guards(found)])


def write(found):
    """Put the tables into their place in the page."""
    put("docs/engines.md", {"engines": tables(found)})
