"""The matrix products of the step and nothing else, each kind by the fastest library there is."""

from collections.abc import Callable
from typing import Any

import torch
from case import Case, lengths, texts
from clock import Clock
from torch import Tensor, nn

import rft_fn as rft

Product = Callable[[Tensor, Tensor], Tensor]  # x [M, K], w [N, K] -> [M, N]


def libraries(device: str, *, fixed: bool = False) -> dict[str, Product]:
    """The ways to multiply on this device; weights that stay fixed can be packed once."""
    found: dict[str, Product] = {"torch.mm": plain}
    if device == "cpu" and torch.backends.mkldnn.is_available():
        found["oneDNN"] = onednn
        if fixed:
            found["oneDNN, packed"] = by_packs({})
    return found


def plain(x: Tensor, w: Tensor) -> Tensor:
    """x wᵀ by torch.mm."""
    return torch.mm(x, w.T)


def onednn(x: Tensor, w: Tensor) -> Tensor:
    """x wᵀ by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


def by_packs(packs: dict[int, Tensor]) -> Product:
    """x wᵀ by oneDNN and packs of the weights, which the first product of each makes."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        if w.data_ptr() not in packs:
            packs[w.data_ptr()] = torch.ops.mkldnn._reorder_linear_weight(w, 64)
        return torch.ops.mkldnn._linear_pointwise(x, packs[w.data_ptr()], None, "none", [], "")

    return product


def steps(case: Case, clock: Clock) -> list[dict]:
    """The row of a step that is only products, and an empty one for the warm-up."""
    lm = rft.model.load(case.model)
    head: Any = lm.get_output_embeddings()
    layers = [m.weight.detach() for m in lm.modules() if isinstance(m, nn.Linear) and m is not head]
    tokenizer = rft.model.load_tokenizer(case.model)
    limits = lengths(case)
    read = [len(tokenizer(p)["input_ids"]) for p in texts(case)]

    # sampling reads each prompt once, then every live row by a token; the head sees each drawn token
    timed = Timed(case.device, clock)
    timed.add("generate", layers, sum(read))
    live = [sum(size > t for size in limits) for t in range(max(limits))]
    for rows in sorted(set(live)):
        timed.add("generate", [*layers, head.weight.detach()], rows, times=live.count(rows))

    # gradients: forward, and both of the backward, in packs; the head for the labels alone
    tokens = case.group * sum(read) + sum(limits)
    size = min(case.budget, tokens)
    timed.add("gradients", layers, size, times=tokens / size, backward=True)
    labels = min(case.budget, sum(limits))
    timed.add("gradients", [head.weight.detach()], labels, times=sum(limits) / labels, backward=True)
    row = clock.row(prompt=case.group * sum(read), response=sum(limits))
    return [{}, row | {"gflops": timed.flops / sum(timed.wall.values()) / 1e9, "by": timed.fastest}]


class Timed:
    """Adds up the products' seconds in a clock."""

    def __init__(self, device: str, clock: Clock):
        self.device = device
        self.clock = clock
        self.wall = clock.wall
        self.cpu = clock.cpu
        self.flops = 0.0
        self.fastest: dict[str, str] = {}
        self.seen: dict[Any, tuple[float, float]] = {}
        self.sampling = libraries(device, fixed=True)
        self.training = libraries(device)

    def add(
        self, phase: str, weights: list[Tensor], rows: int, *, times: float = 1.0, backward: bool = False
    ) -> None:
        """`times` products of [rows, K] with every weight [N, K], and those of its backward if asked for."""
        kinds = ["forward"] + ["dx", "dw"] * backward
        ways = self.training if backward else self.sampling
        for kind in kinds:
            wall, cpu = self._seconds(kind, weights, rows, ways)
            self.wall[phase] += wall * times
            self.cpu[phase] += cpu * times
            self.flops += 2 * rows * sum(w.numel() for w in weights) * times

    def _seconds(
        self, kind: str, weights: list[Tensor], rows: int, ways: dict[str, Product]
    ) -> tuple[float, float]:
        """The fastest library's seconds (on the wall, of the processor), the lesser of two passes."""
        key = (kind, rows, len(weights), len(ways))
        if key not in self.seen:
            found = {}
            for name, product in ways.items():
                passes = [self._once(kind, weights, rows, product) for _ in range(3)]
                found[name] = min(passes[1:], key=sum)
            best = min(found, key=lambda name: found[name][1])
            self.fastest[f"{kind} {rows}"] = best
            self.seen[key] = found[best]
        return self.seen[key]

    def _once(self, kind: str, weights: list[Tensor], rows: int, product: Product) -> tuple[float, float]:
        """One pass over all weights, so that they come from memory as in a step."""
        made = {w.shape: operands(kind, w, rows) for w in weights}
        wall, cpu = self.clock.now()
        for w in weights:
            x, other = made[w.shape]
            if kind == "forward":
                product(x, w)
            elif kind == "dx":
                product(x, w.T)
            else:
                product(x, other)
        end, spent = self.clock.now()
        return end - wall, spent - cpu


def operands(kind: str, w: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """What is multiplied for a weight [N, K]: activations [M, K], gradients [M, N], or both, transposed."""
    n, k = w.shape
    x = torch.randn(rows, k, device=w.device, dtype=w.dtype)
    g = torch.randn(rows, n, device=w.device, dtype=w.dtype)
    found = {"forward": (x, w), "dx": (g, w), "dw": (g.T, x.T)}
    return found[kind]
