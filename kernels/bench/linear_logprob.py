"""Time and memory of linear_logprob on a CPU, beside the naive way, torch's own and what others.py finds.

    PYTHONPATH=kernels python kernels/bench/linear_logprob.py --json kernels/bench/results/cpu.json

Times are medians over interleaved rounds, so that a busy machine slows every variant alike. Each sample knows
which share of the processors other programs had; samples above --quiet are left out wherever three others
remain, and the worst share that was left in is reported.

The GEMM limit is the time of the matrix products alone, into buffers that exist, in the same rounds; a
variant of ours is held against the products that it performs itself (recomputation counts as work), every
other one against those of the naive way. Peak is the
growth of VmHWM over the inputs, returned gradients included, in a process of its own.
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
from pathlib import Path
from typing import NamedTuple

import others
import torch
from others import naive
from torch import Tensor

from rft_kernels import linear_logprob

# h [T, D], w [V, D], y [T], the upstream gradient [T], and w in bfloat16
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Case(NamedTuple):
    operation: str
    variant: str
    call: Callable[[Inputs], object]
    products: tuple[str, ...]  # the matrix products that it performs


def naive_entropy(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (h @ w.T).log_softmax(1)
    return log_p.gather(1, y[:, None])[:, 0], torch.special.entr(log_p.exp()).sum(1)


def ours(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return linear_logprob(h, w, y).logp


def ours_entropy(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return linear_logprob(h, w, y, entropy=True)[:2]


def forward(f: Callable) -> Callable[[Inputs], object]:
    return torch.no_grad()(lambda x: f(*x[:3]))


def backward(f: Callable, *, frozen: bool = False) -> Callable[[Inputs], object]:
    """Forward and backward; the gradients of h and, unless frozen, of w are returned."""

    def call(x: Inputs) -> object:
        leaves = [x[0].detach().requires_grad_(), x[1].detach().requires_grad_(not frozen)]
        return torch.autograd.grad(f(*leaves, x[2]), leaves[: 1 if frozen else 2], x[3])

    return call


def narrow(call: Callable[[Inputs], object]) -> Callable[[Inputs], object]:
    """The same with a head in bfloat16."""
    return lambda x: call((x[0], x[4], *x[2:]))


def cases(only: list[str] | None = None) -> list[Case]:
    """Every operation by every variant, or by those in `only`."""
    three = ("logits", "dh", "dw")
    out = [
        Case("forward", "naive", forward(naive), ("logits",)),
        Case("forward", "ours", forward(ours), ("logits",)),
        Case("forward+backward", "naive", backward(naive), three),
        Case("forward+backward", "ours", backward(ours), ("logits", *three)),
        Case("forward, entropy", "naive", forward(naive_entropy), ("logits",)),
        Case("forward, entropy", "ours", forward(ours_entropy), ("logits",)),
        Case("frozen head, f+b", "naive", backward(naive, frozen=True), ("logits", "dh")),
        Case("frozen head, f+b", "ours", backward(ours, frozen=True), ("logits", "dh")),
    ]
    for operation, call, products in (
        ("forward", forward(ours), ("logits",)),
        ("forward+backward", backward(ours), ("logits", *three)),
        ("frozen head, f+b", backward(ours, frozen=True), ("logits", "dh")),
    ):
        out.append(Case(operation, "ours16", narrow(call), products))
    for name, f in others.variants().items():
        out += [
            Case("forward", name, forward(f), ("logits",)),
            Case("forward+backward", name, backward(f), three),
            Case("frozen head, f+b", name, backward(f, frozen=True), ("logits", "dh")),
        ]
    out = [c for c in out if only is None or c.variant in only]
    return sorted(out, key=lambda c: (c.operation, c.variant))


def make_inputs(args: argparse.Namespace) -> Inputs:
    """Logits of unit variance or so; seeded, so that every process has the same."""
    make = torch.Generator().manual_seed(0)
    h = torch.randn(args.T, args.D, generator=make)
    w = torch.randn(args.V, args.D, generator=make) / args.D**0.5
    y, g = torch.randint(args.V, (args.T,), generator=make), torch.randn(args.T, generator=make)
    return h, w, y, g, w.bfloat16()


def matrix_products(x: Inputs, columns: int) -> dict[str, Callable[[], None]]:
    """The three products by slices of the vocabulary: whole ones would measure page faults of [T, V]."""
    h, w = x[:2]
    tile, dh, dw = h.new_ones(h.shape[0], columns), torch.zeros_like(h), torch.empty_like(w)
    cuts = [slice(a, min(a + columns, len(w))) for a in range(0, len(w), columns)]

    def run(product: Callable[[slice, Tensor], object]) -> Callable[[], None]:
        return lambda: [product(c, tile[:, : c.stop - c.start]) for c in cuts] and None

    return {
        "logits": run(lambda c, z: torch.mm(h, w[c].T, out=z)),
        "dh": run(lambda c, z: dh.addmm_(z, w[c])),
        "dw": run(lambda c, z: torch.mm(z.T, h, out=dw[c])),
    }


class Sample(NamedTuple):
    seconds: float
    foreign: float  # the share of all processors that other programs had meanwhile


def busy_seconds() -> float:
    """Processor time spent by the whole machine, since it started."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting


def sample(call: Callable[[], object]) -> Sample:
    busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
    call()
    seconds, own, busy = time.perf_counter() - start, time.process_time() - own, busy_seconds() - busy
    return Sample(seconds, max(0.0, busy - own) / (seconds * (os.cpu_count() or 1)))


def typical(samples: list[Sample], quiet: float) -> Sample:
    """The median of the quiet samples, or of the three least disturbed ones; with their worst share."""
    kept = sorted(samples, key=lambda s: s.foreign)
    kept = kept[: max(3, sum(s.foreign <= quiet for s in kept))]
    return Sample(statistics.median(s.seconds for s in kept), kept[-1].foreign)


def measure_times(args: argparse.Namespace) -> tuple[dict[str, Sample], list[Sample]]:
    """Of each matrix product, and of each case."""
    x = make_inputs(args)
    products = matrix_products(x, args.columns)
    calls = [*products.values(), *(lambda c=c: c.call(x) for c in cases(args.only))]
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
    """In a process of its own: case number `args.peak` once, after a small call that loads the libraries."""
    case = cases(args.only)[args.peak]
    small = argparse.Namespace(T=8, D=args.D, V=256)
    case.call(make_inputs(small))
    x = make_inputs(args)
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
    return f"{names[0] if names else platform.processor()}, {len(names)} visible"


def results(args: argparse.Namespace) -> dict:
    limits, times = measure_times(args)
    pairs = list(zip(cases(args.only), times, strict=True))
    base = {c.operation: t.seconds for c, t in pairs if c.variant == "naive"}
    rows = [
        {
            "operation": c.operation,
            "variant": c.variant,
            "seconds": round(t.seconds, 3),
            "over_naive": round(t.seconds / base[c.operation], 3),
            "of_gemm_limit": round(sum(limits[p].seconds for p in c.products) / t.seconds, 3),
            "peak_mb": round(measure_peak(i), 1),
        }
        for i, (c, t) in enumerate(pairs)
    ]
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "dtype": "float32",
        **{k: getattr(args, k) for k in ("T", "D", "V", "rounds", "threads")},
        "foreign_share": round(max(t.foreign for t in (*limits.values(), *times)), 3),
        "gemm_seconds": {k: round(v.seconds, 3) for k, v in limits.items()},
        "rows": rows,
    }


def table(rows: list[dict]) -> str:
    lines = [f"{'operation':18}{'variant':9}{'seconds':>9}{'/ naive':>9}{'of GEMM':>9}{'peak MB':>9}"]
    for r in rows:
        numbers = f"{r['seconds']:9.3f}{r['over_naive']:9.2f}{r['of_gemm_limit']:9.2f}{r['peak_mb']:9.0f}"
        lines.append(f"{r['operation']:18}{r['variant']:9}{numbers}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-T", type=int, default=2048, help="tokens")
    parser.add_argument("-D", type=int, default=576, help="width of the hidden states")
    parser.add_argument("-V", type=int, default=49152, help="vocabulary")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that warms up")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of other programs in a good sample")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--columns", type=int, default=2048, help="slice of the vocabulary in the GEMM limit")
    parser.add_argument("--only", nargs="+", help="variants to measure; all that there are without it")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.peak is not None:
        return print_peak(args)
    found = results(args)
    print(f"T={args.T} D={args.D} V={args.V} float32, {args.threads} threads, {found['hardware']}")
    print(f"other programs had up to {found['foreign_share']:.0%} of the processors")
    print(table(found["rows"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
