"""Errors of linear_logprob against float64 on the same rounded inputs.

    PYTHONPATH=kernels python kernels/bench/errors.py

The worst over --seeds draws at two standard deviations of the logits; every second label is the most likely
one; the gradients go through logp and entropy. A CPU has a line for each library that makes its products.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from rft_kernels import linear_logprob, products

COLUMNS = ("logp, max", "entropy, max", "lse, max", "dh, relative norm", "dw, relative norm")


def problem(args: argparse.Namespace, seed: int, std: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """h [T, D], w [V, D], y [T], where the logits have standard deviation std.

    h and w are rounded to dtype.
    """
    make = torch.Generator(args.device).manual_seed(seed)
    h = torch.randn(args.T, args.D, generator=make, device=args.device).to(dtype)
    w = (torch.randn(args.V, args.D, generator=make, device=args.device) * std / args.D**0.5).to(dtype)
    y = torch.randint(args.V, (args.T,), generator=make, device=args.device)
    y[::2] = (h.float() @ w.float().T).argmax(1)[::2]
    return h, w, y


def outputs(h: Tensor, w: Tensor, y: Tensor, *, engine: str) -> list[Tensor]:
    """logp, entropy, lse, and the gradients of sum(logp + entropy) in h and w, in float64."""
    h = h.detach().requires_grad_()
    w = w.detach().requires_grad_()
    found = linear_logprob(h, w, y, entropy=True, lse=True, engine=engine)
    out = [x for x in found if x is not None]  # all three
    grads = torch.autograd.grad((out[0] + out[1]).sum(), (h, w))
    return [x.detach().double() for x in (*out, *grads)]


def errors(args: argparse.Namespace, dtype: torch.dtype, std: float) -> list[float]:
    """The worst of every column, over the draws."""
    found = []
    for seed in range(args.seeds):
        h, w, y = problem(args, seed, std, dtype)
        want = outputs(h.double(), w.double(), y, engine="reference")
        got = outputs(h, w, y, engine=args.engine)

        # The worst of the outputs, and the gradients by their norm.
        off = [a - b for a, b in zip(got, want, strict=True)]
        largest = [float(x.abs().max()) for x in off[:3]]
        norms = [float(x.norm() / r.norm()) for x, r in zip(off[3:], want[3:], strict=True)]
        found.append([*largest, *norms])
    return [max(column) for column in zip(*found, strict=True)]


def use_onednn(on: bool) -> None:
    """Let every large product of float32 be oneDNN's, or none."""

    def answer() -> bool:
        return on

    products.mkl_is_half = answer


def main() -> None:
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-T", type=int, default=256, help="tokens")
    parser.add_argument("-D", type=int, default=576, help="width of the hidden states")
    parser.add_argument("-V", type=int, default=32768, help="vocabulary")
    parser.add_argument("--std", type=float, nargs="+", default=[1.0, 4.0], help="of the logits")
    parser.add_argument("--seeds", type=int, default=3, help="draws")
    parser.add_argument("--engine", default="auto", help="of linear_logprob")
    parser.add_argument("--device", default=device)
    args = parser.parse_args()

    # A CPU has a line for each library, whatever it would take by itself.
    libraries = {"": products.mkl_is_half()}
    if args.device == "cpu" and torch.backends.mkldnn.is_available():
        libraries = {", torch.mm": False, ", oneDNN": True}
    print(f"{'inputs':<20}{'std':>6}" + "".join(f"{c:>20}" for c in COLUMNS))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for library, by_onednn in libraries.items():
            use_onednn(by_onednn)
            for std in args.std:
                name = str(dtype).removeprefix("torch.") + library
                print(f"{name:<20}{std:>6g}" + "".join(f"{x:>20.1e}" for x in errors(args, dtype, std)))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
