"""Time and memory of log-probs of given logits on a CPU, fused and plain.

    PYTHONPATH=.:kernels python kernels/bench/logits.py --json kernels/bench/results/cpu_logits.json

Medians of interleaved rounds, and the peak of each case in a separate process, as in linear_logprob.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path

import torch
from linear_logprob import hardware, high_water, sample, typical
from torch import Tensor

from rft_fn import logprob

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plain_logp(z: Tensor, y: Tensor) -> Tensor:
    z = z.float()
    return z.gather(1, y[:, None])[:, 0] - z.logsumexp(1)


def plain_entropy(z: Tensor, y: Tensor) -> Tensor:
    log_p = z.float().log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def our_entropy(z: Tensor, y: Tensor) -> Tensor:
    return logprob.entropy_from_logits(z)


FUNCTIONS = {
    ("logp", "plain"): plain_logp,
    ("logp", "ours"): logprob.log_probs_from_logits,
    ("entropy", "plain"): plain_entropy,
    ("entropy", "ours"): our_entropy,
}
CASES = list(product(DTYPES, (False, True), FUNCTIONS))  # (type, with the gradient, (quantity, variant))


def call(case: tuple, z: Tensor, y: Tensor) -> Tensor:
    """The quantity of a case, or its gradient in z."""
    _, gradient, key = case
    z = z.detach().requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        out = FUNCTIONS[key](z, y)
    if gradient:
        return torch.autograd.grad(out.sum(), z)[0]
    return out


def inputs(args: argparse.Namespace) -> Callable[[tuple, int], tuple[Tensor, Tensor]]:
    """(case, rows) -> so many logits of its type, and their labels."""
    make = torch.Generator().manual_seed(0)
    z = {name: torch.randn(args.T, args.V, generator=make).to(dtype) for name, dtype in DTYPES.items()}
    y = torch.randint(args.V, (args.T,), generator=make)
    return lambda case, rows: (z[case[0]][:rows], y[:rows])


def print_peak(args: argparse.Namespace) -> None:
    """In a separate process: print the growth of memory in case number `args.peak`."""
    case = CASES[args.peak]
    take = inputs(args)
    call(case, *(x.clone() for x in take(case, 2)))  # loads libraries
    Path("/proc/self/clear_refs").write_text("5")  # the mark now starts from what is resident
    before = high_water()
    kept = call(case, *take(case, args.T))
    print(high_water() - before)
    del kept


def measure_peak(case: int) -> float:
    command = [sys.executable, *sys.argv, "--peak", str(case)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def results(args: argparse.Namespace) -> dict:
    """All that is written to --json."""
    # Interleaved rounds, after one that warms up.
    take = inputs(args)
    calls = [partial(call, case, *take(case, args.T)) for case in CASES]
    for warm_up in calls:
        warm_up()
    rounds = [[sample(one) for one in calls] for _ in range(args.rounds)]
    times = [typical(list(column), 0.1) for column in zip(*rounds, strict=True)]
    # A row for each case; its peak is measured in a separate process.
    rows = []
    for i, ((dtype, gradient, (quantity, variant)), t) in enumerate(zip(CASES, times, strict=True)):
        operation = quantity
        if gradient:
            operation += ", gradient"
        row = {"dtype": dtype, "operation": operation, "variant": variant}
        rows.append(row | {"seconds": round(t.seconds, 4), "peak_mb": round(measure_peak(i), 1)})
    head = {"date": date.today().isoformat(), "hardware": hardware(), "torch": torch.__version__}
    head |= {"threads": torch.get_num_threads(), "foreign_share": round(max(t.foreign for t in times), 3)}
    return head | {"T": args.T, "V": args.V, "rounds": args.rounds, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-T", type=int, default=1024, help="tokens")
    parser.add_argument("-V", type=int, default=49152, help="vocabulary")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # A process that was started for one case's peak prints that alone.
    if args.peak is not None:
        print_peak(args)
        return
    found = results(args)
    print(f"other programs had up to {found['foreign_share']:.0%} of the processors")
    for r in found["rows"]:
        print(f"{r['dtype']:10}{r['operation']:20}{r['variant']:8}{r['seconds']:9.3f}{r['peak_mb']:9.0f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
