"""Measure which engine is fastest on this CUDA device, and write it into auto.json.

    PYTHONPATH=kernels python kernels/bench/tune.py

At each width D: a forward (what old and reference log-probs cost) and a forward with its backward, bfloat16,
medians of interleaved rounds, added up. Between two widths with different winners the limit is half-way. Only
the entry of this kind of device is replaced, with the source of its numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch
from cases import backward, forward, make_inputs, ours
from gpu import CUDA, Clock, provenance

from rft_kernels import engines

FILE = Path(engines.__file__).with_name("auto.json")
ENGINES = ("gemm", "triton", "streamed")


def measure(
    args: argparse.Namespace, clock: Clock, *, device: str = "cuda", names: tuple[str, ...] = ENGINES
) -> dict[int, dict[str, float]]:
    """Width -> engine -> seconds of a forward and of a forward with its backward."""
    found = {}
    for width in args.widths:
        x = make_inputs(args.T, width, args.V, dtype=torch.bfloat16, device=device)
        calls = {}
        for name in names:
            f = partial(ours, engine=name)
            calls[name, forward] = partial(forward(f), x)
            calls[name, backward] = partial(backward(f), x)
        for call in calls.values():
            call()  # compiles

        # Rounds are interleaved, so that a device whose clock changes does it to every engine alike.
        rounds = [{key: clock.seconds(call) for key, call in calls.items()} for _ in range(args.rounds)]
        median = {key: statistics.median(r[key] for r in rounds) for key in calls}
        found[width] = {n: median[n, forward] + median[n, backward] for n in names}
        print(f"D = {width}: " + ", ".join(f"{n} {s * 1e3:.2f} ms" for n, s in found[width].items()))
    return found


def rules(found: dict[int, dict[str, float]]) -> list[list]:
    """[[largest D or null, engine], ...], as `engines.choose` reads it: the fastest at each width."""
    widths = sorted(found)
    best = [min(found[d], key=found[d].__getitem__) for d in widths]
    out = []
    for i, name in enumerate(best):
        if i + 1 == len(best):
            out.append([None, name])
        elif best[i + 1] != name:
            out.append([(widths[i] + widths[i + 1]) // 2, name])
    return out


def rewrite(path: Path, found: dict[int, dict[str, float]], source: dict) -> None:
    """The entry of one kind of device, `source["capability"]`, with where it comes from."""
    content = json.loads(path.read_text())
    seconds = {str(d): {n: round(s, 6) for n, s in times.items()} for d, times in found.items()}
    content["engine"][source["capability"]] = {"rules": rules(found), "source": source | {"seconds": seconds}}
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 896, 1536, 2048, 3584, 5120, 8192])
    parser.add_argument("-T", type=int, default=8192, help="tokens")
    parser.add_argument("-V", type=int, default=131072, help="vocabulary")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune.py: expected a CUDA device, got none")
    found = measure(args, CUDA)
    rewrite(args.out, found, provenance() | {"T": args.T, "V": args.V, "rounds": args.rounds})
    print(f"{args.out}: {rules(found)}")


if __name__ == "__main__":
    main()
