"""The cases that are measured.

Each is an operation on the same inputs: by the naive way, by ours and by others.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import others
import torch
from others import naive
from torch import Tensor

from rft_kernels import linear_logprob, products

# h [T, D], w [V, D], y [T], the upstream gradient [T], and w in bfloat16
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
ONEDNN = ", oneDNN"


class Case(NamedTuple):
    """One operation by one variant."""

    operation: str
    variant: str
    call: Callable[[Inputs], object]
    products: tuple[str, ...]  # the matrix products that it performs


def naive_entropy(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (h @ w.T).log_softmax(1)
    return log_p.gather(1, y[:, None])[:, 0], torch.special.entr(log_p.exp()).sum(1)


def ours(h: Tensor, w: Tensor, y: Tensor, *, engine: str) -> Tensor:
    return linear_logprob(h, w, y, engine=engine).logp


def ours_entropy(h: Tensor, w: Tensor, y: Tensor, *, engine: str) -> tuple[Tensor, ...]:
    return linear_logprob(h, w, y, entropy=True, engine=engine)[:2]


def forward(f: Callable) -> Callable[[Inputs], object]:
    """The forward alone, without autograd."""
    return torch.no_grad()(lambda x: f(*x[:3]))


def backward(f: Callable, *, frozen: bool = False) -> Callable[[Inputs], object]:
    """Forward and backward; the gradients of h and, unless frozen, of w are returned."""

    def call(inputs: Inputs) -> object:
        h, w, y, upstream, _ = inputs
        h = h.detach().requires_grad_()
        w = w.detach().requires_grad_(not frozen)
        trained = [h]
        if not frozen:
            trained.append(w)
        out = f(h, w, y)
        return torch.autograd.grad(out, trained, upstream.to(out.dtype))

    return call


def narrow(call: Callable[[Inputs], object]) -> Callable[[Inputs], object]:
    """The same with a head in bfloat16."""
    return lambda x: call((x[0], x[4], *x[2:]))


def unchanged(call: Callable[[Inputs], object]) -> Callable[[Inputs], object]:
    """The same with the inputs as they are."""
    return call


def three(variant: str, f: Callable, wrap: Callable = unchanged, *, recomputes: bool = False) -> list[Case]:
    """Forward, forward and backward, and that with a frozen head."""
    trained = ["logits", "dh", "dw"]
    if recomputes:
        trained.append("logits")
    return [
        Case("forward", variant, wrap(forward(f)), ("logits",)),
        Case("forward+backward", variant, wrap(backward(f)), tuple(trained)),
        Case("frozen head, f+b", variant, wrap(backward(f, frozen=True)), ("logits", "dh")),
    ]


def cases(engines: dict[str, str], *, mixed: bool, only: list[str] | None = None) -> list[Case]:
    """Every operation by every variant, or by those in `only`.

    naive is always there: the others are held against it.

    engines: the name in the table -> the engine of ours. mixed: also ours with a head in bfloat16.
    """
    out = [Case("forward, entropy", "naive", forward(naive_entropy), ("logits",)), *three("naive", naive)]
    for name, engine in engines.items():
        with_entropy = forward(partial(ours_entropy, engine=engine))
        out.append(Case("forward, entropy", name, with_entropy, ("logits",)))
        out += three(name, partial(ours, engine=engine), recomputes=True)
    if mixed:
        out += three("ours16", partial(ours, engine="auto"), narrow, recomputes=True)
    for name, f in others.variants().items():
        out += three(name, f)

    # Those that --only names, and naive.
    names = sorted({c.variant for c in out})
    if unknown := set(only or ()) - set(names):
        sys.exit(f"error: --only: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    if only is not None:
        out = [c for c in out if c.variant in (*only, "naive")]
    return sorted(out, key=lambda c: (c.operation, c.variant))


def make_inputs(T: int, D: int, V: int, *, dtype: torch.dtype, device: str) -> Inputs:
    """Logits of unit variance or so; seeded, so that every process has the same."""
    make = torch.Generator(device).manual_seed(0)
    h = torch.randn(T, D, generator=make, device=device).to(dtype)
    w = (torch.randn(V, D, generator=make, device=device) / D**0.5).to(dtype)
    y = torch.randint(V, (T,), generator=make, device=device)
    return h, w, y, torch.randn(T, generator=make, device=device), w.bfloat16()


def matrix_products(x: Inputs, columns: int) -> dict[str, Callable[[], None]]:
    """The three matrix products of a head, by slices of the vocabulary.

    Whole ones would measure page faults of [T, V].

    By torch.mm into buffers that exist, and by another library where ours takes that: `rft_kernels.products`.
    """
    h, w = x[:2]
    # Buffers exist before the clock starts: their pages are touched once.
    tile = h.new_ones(h.shape[0], columns)
    dh = torch.zeros_like(h)
    dw = torch.empty_like(w)
    cuts = [slice(start, min(start + columns, len(w))) for start in range(0, len(w), columns)]

    def run(product: Callable[[slice, Tensor], object]) -> Callable[[], None]:
        def call() -> None:
            for cols in cuts:
                product(cols, tile[:, : cols.stop - cols.start])

        return call

    found = {
        "logits": run(lambda cols, z: torch.mm(h, w[cols].T, out=z)),
        "dh": run(lambda cols, z: dh.addmm_(z, w[cols])),
        "dw": run(lambda cols, z: torch.mm(z.T, h, out=dw[cols])),
    }
    # oneDNN's products too, where ours are made by it.
    if products.by_onednn(h):
        found["logits" + ONEDNN] = run(lambda cols, z: products.mm(h, w[cols].T))
        found["dh" + ONEDNN] = run(lambda cols, z: products.add_mm(dh, z, w[cols]))
        found["dw" + ONEDNN] = run(lambda cols, z: products.mm(z.T, h, dw[cols]))
    return found


def gemm_limit(names: tuple[str, ...], seconds: dict[str, float]) -> float:
    """The time of some products of `matrix_products`, each by the faster library."""
    return sum(min(seconds[n], seconds.get(n + ONEDNN, seconds[n])) for n in names)


def table(rows: list[dict]) -> str:
    """Rows of a result, as text; '-' for a case that did not fit into memory."""
    keys = {"seconds": 4, "over_naive": 2, "of_gemm_limit": 2, "peak_mb": 0}
    lines = [f"{'operation':18}{'variant':10}{'seconds':>9}{'/ naive':>9}{'of GEMM':>9}{'peak MB':>9}"]
    for row in rows:
        line = f"{row['operation']:18}{row['variant']:10}"
        for key, digits in keys.items():
            number = "-"
            if row[key] is not None:
                number = f"{row[key]:.{digits}f}"
            line += f"{number:>9}"
        lines.append(line)
    return "\n".join(lines)
