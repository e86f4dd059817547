"""Time and memory of linear_logprob beside the naive way, torch's own and what others.py finds.

    PYTHONPATH=kernels python kernels/bench/linear_logprob.py --json kernels/bench/results/cpu.json

Where there is a CUDA device the same command measures that instead (gpu.py), unless --cpu is given.

Times are medians over interleaved rounds, so that a busy machine slows every variant alike. Each sample has
the share of the processors that other programs took; samples above --quiet are left out wherever three others
remain, and the worst share that was left in is reported.

The GEMM limit is the time of the matrix products alone in the same rounds, each by the faster of the
libraries that torch has; a variant of ours is held against the products that it performs itself
(recomputation counts as work), every other one against those of the naive way. Peak is the growth of VmHWM
over the inputs, returned gradients included, in a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gpu
import torch
from cases import Case, Inputs, cases, gemm_limit, make_inputs, matrix_products, table


def cpu_cases(only: list[str] | None) -> list[Case]:
    return cases({"ours": "auto"}, mixed=True, only=only)


def cpu_inputs(args: argparse.Namespace) -> Inputs:
    return make_inputs(args.T, args.D, args.V, dtype=torch.float32, device="cpu")


class Sample(NamedTuple):
    """One measured call."""

    seconds: float
    foreign: float  # the share of all processors that other programs had meanwhile


def busy_seconds() -> float:
    """Processor time spent by the whole machine, since it started."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting


def sample(call: Callable[[], object]) -> Sample:
    """A call, with the processor time of the machine less this process's."""
    busy_before = busy_seconds()
    own_before = time.process_time()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    foreign = busy_seconds() - busy_before - (time.process_time() - own_before)
    return Sample(seconds, max(0.0, foreign) / (seconds * (os.cpu_count() or 1)))


def typical(samples: list[Sample], quiet: float) -> Sample:
    """The median of the quiet samples, with their worst share.

    Where fewer than three are quiet, of the three least disturbed ones.
    """
    ordered = sorted(samples, key=lambda s: s.foreign)
    quiet_ones = [s for s in ordered if s.foreign <= quiet]
    kept = ordered[: max(3, len(quiet_ones))]
    return Sample(statistics.median(s.seconds for s in kept), kept[-1].foreign)


def measure_times(args: argparse.Namespace) -> tuple[dict[str, Sample], list[Sample]]:
    """The time of each matrix product, and of each case."""
    x = cpu_inputs(args)
    products = matrix_products(x, args.columns)
    calls = [*products.values(), *(partial(c.call, x) for c in cpu_cases(args.only))]
    for call in calls:
        call()  # loads libraries, fills caches
    rounds = [[sample(call) for call in calls] for _ in range(args.rounds)]
    found = [typical(list(column), args.quiet) for column in zip(*rounds, strict=True)]
    return dict(zip(products, found, strict=False)), found[len(products) :]


def high_water() -> float:
    """VmHWM in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status: expected a line VmHWM, got none")


def print_peak(args: argparse.Namespace) -> None:
    """In a separate process: case number `args.peak` once, after a small call that loads the libraries."""
    case = cpu_cases(args.only)[args.peak]
    case.call(cpu_inputs(argparse.Namespace(T=8, D=args.D, V=256)))
    x = cpu_inputs(args)
    Path("/proc/self/clear_refs").write_text("5")  # the mark now starts from what is resident
    before = high_water()
    kept = case.call(x)
    print(high_water() - before)
    del kept


def measure_peak(case: int) -> float:
    command = [sys.executable, *sys.argv, "--peak", str(case)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def hardware() -> str:
    """The processor's name, as the kernel has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = platform.processor()
    if names:
        name = names[0]
    return f"{name}, {len(names)} visible"


def results(args: argparse.Namespace) -> dict:
    """All that is written to --json."""
    limits, times = measure_times(args)
    seconds = {name: limit.seconds for name, limit in limits.items()}
    pairs = list(zip(cpu_cases(args.only), times, strict=True))
    naive = {c.operation: t.seconds for c, t in pairs if c.variant == "naive"}

    # Each case beside the naive way, and beside the products that it performs.
    rows = []
    for i, (c, t) in enumerate(pairs):
        row = {"operation": c.operation, "variant": c.variant, "seconds": round(t.seconds, 3)}
        row["over_naive"] = round(t.seconds / naive[c.operation], 3)
        row["of_gemm_limit"] = round(gemm_limit(c.products, seconds) / t.seconds, 3)
        row["peak_mb"] = round(measure_peak(i), 1)
        rows.append(row)
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "dtype": "float32",
        **{k: getattr(args, k) for k in ("T", "D", "V", "rounds", "threads")},
        "foreign_share": round(max(t.foreign for t in (*limits.values(), *times)), 3),
        "gemm_seconds": {k: round(v, 3) for k, v in seconds.items()},
        "rows": rows,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-T", type=int, default=2048, help="tokens; a GPU has the sizes of gpu.py")
    parser.add_argument("-D", type=int, default=576, help="width of the hidden states")
    parser.add_argument("-V", type=int, default=49152, help="vocabulary")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU although there is a GPU")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that warms up")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of other programs in a good sample")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--columns", type=int, default=1024, help="slice of the vocabulary in the GEMM limit")
    parser.add_argument("--only", nargs="+", help="variants to measure; all that there are without it")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if torch.cuda.is_available() and not args.cpu:
        gpu.main(args)
        return
    torch.set_num_threads(args.threads)
    if args.peak is not None:
        print_peak(args)
        return
    found = results(args)
    print(f"T={args.T} D={args.D} V={args.V} float32, {args.threads} threads, {found['hardware']}")
    print(f"other programs had up to {found['foreign_share']:.0%} of the processors")
    print("products alone: " + "; ".join(f"{k} {v:.3f} s" for k, v in found["gemm_seconds"].items()))
    print(table(found["rows"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
