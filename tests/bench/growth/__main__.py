"""How the cost of a step grows, measured on a CPU; what many GPUs would send each other, computed.

    python tests/bench/growth --out runs/growth       # measure
    python tests/bench/growth --write                 # and write docs/results/growth and docs/scaling.md
    python tests/bench/growth --only comm --network.outside 25e9     # the model alone, another network

Seconds are of the processor on one thread, so other programs hardly change them. Bytes are torch's
allocations at the peak of a gradient, parameters not among them. Exits with 1 where a cost of the host
(plan, load, weights, report, checkpoint, judge) grows faster than its size to the power of 1.2.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import axes
import comm
import host
import load
import show
from record import made

import rft_fn as rft

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))  # where `ranks` is
PARTS = ("axes", "ranks", "gather", "comm", "load", "host")


@dataclass(frozen=True)
class Config:
    out: str = "runs/growth"  # folder of growth.json and growth.png
    only: tuple[str, ...] = PARTS  # what to measure; the rest is that of growth.json, there or in docs/
    responses: int = 1024  # of the rollout that is gathered
    tokens: int = 16384  # of each of them
    write: bool = False  # put the data, the picture and the tables into docs/
    network: comm.Network = field(default_factory=comm.Network)


def measured(cfg: Config, part: str) -> Any:
    """One part of the results."""
    import ranks

    if part == "axes":
        return axes.measured(list(axes.AXES))
    if part == "ranks":
        return {str(n): ranks.run(n, "bench.growth.axes:rank") for n in (1, 2, 4)}
    if part == "gather":
        return gathered(cfg)
    if part == "load":
        return load.measured()
    if part == "host":
        return host.measured()
    found = {"counted": ranks.run(4, "bench.growth.comm:count")[0], "assumed": comm.assumptions(cfg.network)}
    return found | {"tables": {name: comm.table(net) for name, net in comm.slower(cfg.network).items()}}


def gathered(cfg: Config) -> list[dict[str, Any]]:
    """The rollout's cost on two ranks, at an eighth of its responses and at all of them."""
    import ranks

    rows = []
    for responses in (cfg.responses // 8, cfg.responses):
        x = ranks.run(2, "bench.growth.gather:measure", responses, cfg.tokens, cfg.tokens)
        rows.append(
            {"responses": responses, "tokens": cfg.tokens} | max(x, key=lambda r: sum(r["cpu"].values()))
        )
    return rows


def main(cfg: Config) -> None:
    """Measure part after part; what is there is kept."""
    wrong = [x for x in cfg.only if x not in PARTS]
    if wrong:
        raise ValueError(f"only: expected {', '.join(PARTS)}, got {', '.join(wrong)}")
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "growth.json"
    found: dict[str, Any] = {}
    for known in (file, ROOT / "docs" / "results" / "growth" / "growth.json"):
        if known.exists():
            found = json.loads(known.read_text())
            break
    for part in cfg.only:
        about = made() | {"command": f"python tests/bench/growth --only {part}"}
        found[part] = {"made": about, "found": measured(cfg, part)}
        file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{part}: done", flush=True)

    if "axes" in found:
        show.picture(found, out / "growth.png")
    for text in show.tables(found).values():
        print("\n" + text)
    if cfg.write:
        show.write(found, out, ROOT)

    # what was measured now decides, not what is kept of earlier times
    held = show.held({part: found[part] for part in cfg.only})
    if held:
        print("\nexponents: " + ", ".join(f"{name} {x:.2f}" for name, (_, x) in held.items()))
    steep = [
        f"{name}: expected an exponent of {host.MOST} at most, got {x:.2f}"
        for name, (_, x) in held.items()
        if x > host.MOST
    ]
    if steep:
        sys.exit("\n".join(steep))


if __name__ == "__main__":
    rft.run.cli(main, Config)
