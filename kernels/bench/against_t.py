"""Time and memory against the number of tokens, as a picture: the naive way and ours.

    PYTHONPATH=kernels python kernels/bench/against_t.py --out kernels/bench/results/against_t.png

For each T the same interleaved rounds, and a process per case, as in linear_logprob.py; the numbers
go beside the picture as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).with_name("linear_logprob.py")
SHOWN = ("forward", "forward+backward", "frozen head, f+b")


def measure(tokens: int, args: argparse.Namespace) -> dict:
    """The result of linear_logprob.py at one T."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, str(BENCH), "-T", str(tokens), "-D", str(args.D), "-V", str(args.V)]
        command += ["--rounds", str(args.rounds), "--only", "naive", "ours", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def draw(found: list[dict], path: Path) -> None:
    """Seconds and peak memory against T, one line for each operation and variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # Seconds on the left, memory on the right; a colour for each operation, dashes for the naive way.
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    tokens = [f["T"] for f in found]
    for i, operation in enumerate(SHOWN):
        for variant, style in (("naive", "--"), ("ours", "-")):
            rows = [
                row
                for one in found
                for row in one["rows"]
                if row["operation"] == operation and row["variant"] == variant
            ]
            label = f"{operation}, {variant}"
            axes[0].plot(tokens, [r["seconds"] for r in rows], style, color=f"C{i}", marker=".", label=label)
            axes[1].plot(tokens, [r["peak_mb"] for r in rows], style, color=f"C{i}", marker=".", label=label)
    # Both axes are logarithmic, with the measured numbers of tokens alone as ticks.
    for ax, title in zip(axes, ("seconds", "peak memory beyond the inputs, MB"), strict=True):
        ax.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        ax.set_xticks(tokens, [str(t) for t in tokens], minor=False)
        ax.set_xticks([], minor=True)
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("-D", type=int, default=576, help="width of the hidden states")
    parser.add_argument("-V", type=int, default=49152, help="vocabulary")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("against_t.png"))
    args = parser.parse_args()
    found = []
    for tokens in args.tokens:
        found.append(measure(tokens, args))
        print(f"T = {tokens}: done", flush=True)
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, args.out)


if __name__ == "__main__":
    main()
