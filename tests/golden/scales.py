"""Gradients of other systems on `batch.scaled`, into scales.json: every scale of log-ratios, tool tokens, a
response without tokens. Numbers only, 13 digits.

    python -m golden.scales             # the newest trl
    python -m golden.scales dropped     # trl 1.5.1
    python -m golden.scales verl        # verl 0.9.1
    python -m golden.scales verl-old    # verl 0.7.0
    python -m golden.scales openrlhf    # and areal
"""

import datetime
import hashlib
import json
import sys
from functools import partial
from pathlib import Path

import torch
from golden import batch

FILE = Path(__file__).with_name("scales.json")
HOLES, WHOLE, FULL = "tool tokens", "no tool tokens", "no tool tokens, no empty response"
VARIANTS = {HOLES: {}, WHOLE: {"holes": False}, FULL: {"holes": False, "silent": False}}


def digest(data: dict) -> str:
    """Of one batch, so that numbers and inputs stay together."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def inputs() -> dict[str, str]:
    every = [(scale, v) for scale in batch.SCALES for v in VARIANTS]
    return {f"{scale}, {v}": digest(batch.scaled(scale, **VARIANTS[v])) for scale, v in every}


def rounded(x: float) -> float:
    return float(f"{x:.13g}")


def trl_calls(dropped: bool) -> dict:
    """key -> (variant, call): every entry of trl.json that has a gradient in log-probs and an old policy."""
    from golden import trl_dropped, trl_losses

    if dropped:
        return {k: (FULL if k == "ppo/loss" else HOLES, call) for k, call in trl_dropped.entries().items()}
    rest = {k: c for k, c in trl_losses.others().items() if k.startswith(("gmpo", "async"))}
    rloo = {k: c for k, c in trl_losses.others().items() if k.startswith("rloo")}
    rloo = {
        k: partial(c, mask_truncated_completions=True) for k, c in rloo.items()
    }  # it has no mask of tools
    out = {k: (HOLES, c) for k, c in (trl_losses.grpo() | rest).items()}
    return out | {k: (WHOLE, c) for k, c in rloo.items()}


def measured(part: str) -> tuple[dict, dict]:
    """(versions, {key: {"part", "variant", "grad": {scale: {leaf: numbers}}}})."""
    if part.startswith("verl"):
        from golden import verl_losses as source

        versions, calls, use = source.versions(), source.entries(), source.use
    elif part in ("openrlhf", "areal"):
        from golden import other_losses as source

        versions, calls, use = source.versions(part), source.entries(part), source.use
    else:
        import trl
        from golden import trl_drive

        versions, calls, use = {"trl": trl.__version__}, trl_calls(part == "dropped"), trl_drive.use
    out = {k: {"part": part, "variant": variant, "grad": {}} for k, (variant, _) in calls.items()}
    for scale in batch.SCALES:
        for key, (variant, call) in calls.items():
            use(batch.scaled(scale, **VARIANTS[variant]))
            grad = call()["grad"]
            out[key]["grad"][str(scale)] = {leaf: [rounded(x) for x in g] for leaf, g in grad.items()}
    return versions | {"torch": torch.__version__}, out


def write(part: str) -> None:
    """scales.json with the entries of this part made anew."""
    old = json.loads(FILE.read_text()) if FILE.exists() else {"entries": {}, "made": {}}
    kept = {k: v for k, v in old["entries"].items() if v["part"] != part}
    versions, new = measured(part)
    made = old["made"] | {part: {**versions, "date": datetime.date.today().isoformat()}}
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted((kept | new).items()))
    head = f' "made": {json.dumps(made)},\n "inputs": {json.dumps(inputs())},\n'
    FILE.write_text("{\n" + head + ' "entries": {\n' + rows + "\n }\n}\n")
    print(f"{FILE.name}: {len(new)} entries of {part}, {versions}")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    write(sys.argv[1] if sys.argv[1:] else "current")
